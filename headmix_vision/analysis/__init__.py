"""Looks into attention layers: their effective matrices in numbers and maps, and what they have learned to mix.

The command line is `headmix-analyze`. From Python:

    from headmix_vision.analysis.attention_matrices import record_attention
    attention = record_attention(network, images)[3]           # of layer 3
    matrices = attention.matrices(0)                           # of the first image: [H, N, N], float64
"""

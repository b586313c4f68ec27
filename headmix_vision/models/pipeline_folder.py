"""Folders of diffusers' Wan and Sana pipelines: their index, the shift of their scheduler, their text encoder.

B prompts, L tokens, C width of the text encoder.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headmix_vision.errors import InputError
from headmix_vision.files.reading import check_fields, check_files, read_json
from headmix_vision.files.tensors import file_sha256, sampled_sha256

INDEX = "model_index.json"
PIPELINES = {"WanPipeline": "WanTransformer3DModel", "SanaPipeline": "SanaTransformer2DModel"}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_TEXT_OPTIONS = ("max_sequence_length", "clean_caption", "complex_human_instruction")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NO_NUMBERS = re.compile(  # entries of a text encoder's config.json that change no embedding
    r"_.*|.*version|.*dtype|.*dropout.*|initializer_.*|.*token_id|use_cache|architectures|tokenizer_class"
)
_TOKENIZER_OPTIONS = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "legacy", "padding_side")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_REFUSED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError)


def read_pipeline(folder: str | Path) -> dict[str, Any]:
    """Read the index of a folder that `WanPipeline` or `SanaPipeline` has saved.

    Raises:
        InputError: If it is not such a folder.
    """
    file = Path(folder) / INDEX
    if not file.is_file():
        message = f"{folder} is not a pipeline folder of diffusers: it has no {INDEX}"
        if _HUB_ID.fullmatch(str(folder)) and not Path(folder).exists():
            message += f". Download a hub id first: hf download {folder} --local-dir FOLDER"
        raise InputError(message)
    index = check_fields(str(file), read_json(file), {"_class_name": str})
    if index["_class_name"] not in PIPELINES:
        raise InputError(f"{folder} is a {index['_class_name']}, it must be one of {', '.join(PIPELINES)}")
    return index


def part_of(folder: str | Path, name: str, library: str | None = None) -> str:
    """Return the class of a part of a pipeline, whose folder must be there, of one library or of any.

    Raises:
        InputError: If the index names none, or one of another library, or its folder is missing.
    """
    entry, place = read_pipeline(folder).get(name), Path(folder) / name
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str) and place.is_dir()):
        raise InputError(f"{folder} has no {name}: a pipeline folder needs its own")
    if library not in (None, entry[0]):
        raise InputError(f"the {name} of {folder} is of the module {entry[0]!r}, it must be one of {library}")
    check_files(place)
    return str(entry[1])


def read_shift(folder: str | Path) -> float:
    """Read the shift of noise levels of a pipeline's scheduler, 1 where it states none.

    Raises:
        InputError: If it is no pipeline folder, or its scheduler chooses the shift by the size or does not predict a
            velocity.
    """
    read_pipeline(folder)
    file = Path(folder) / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        raise InputError(f"{folder} has no scheduler/{file.name}: set model.pipeline_shift to false")
    config = check_fields(str(file), read_json(file), {"prediction_type": str | None})
    if config.get("use_dynamic_shifting"):
        raise InputError(
            f"the scheduler of {folder} shifts by size: set model.pipeline_shift to false and"
            " model.objective.shift to one shift"
        )
    if config["prediction_type"] not in (None, "flow_prediction"):
        raise InputError(f"the scheduler of {folder} predicts {config['prediction_type']}, it must be flow_prediction")
    shift = config.get("flow_shift", config.get("shift"))
    return 1.0 if shift is None else float(shift)


def describe_text_encoder(folder: str | Path) -> dict[str, Any] | None:
    """Describe what decides the embeddings of a pipeline's prompts, without loading its text encoder.

    Returns:
        Hash of text encoder and tokenizer, classes of pipeline and text encoder, and the options of `encode_prompt`,
        which are known where transformers is installed; None where the folder has no text encoder or no tokenizer, or
        lacks their files.

    Raises:
        InputError: If it is not a pipeline folder, or a file is damaged.
    """
    index, place = read_pipeline(folder), Path(folder) / "text_encoder"
    entry, config, weights = index.get("text_encoder"), place / "config.json", _weight_files(place)
    if not (isinstance(entry, list) and entry and isinstance(entry[-1], str) and config.is_file() and weights):
        return None
    tokenizer = _describe_tokenizer(Path(folder) / "tokenizer")
    if not tokenizer:
        return None
    parts = [_without_noise(read_json(config)), tokenizer, sampled_sha256(weights)]
    return {
        "sha256": hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
        "pipeline": index["_class_name"],
        "class": entry[-1],
        **_text_options(index["_class_name"]),
    }


def _weight_files(folder: Path) -> list[Path]:
    """Find the files of weights that transformers loads; none if one is missing."""
    for name in _WEIGHTS:
        files, index = [folder / name], folder / f"{name}.index.json"
        if not files[0].is_file() and index.is_file():
            names = check_fields(str(index), read_json(index), {"weight_map": dict})["weight_map"].values()
            files = sorted({folder / Path(str(file)).name for file in names})
        if all(file.is_file() for file in files):
            return files
    return []


def _without_noise(config: Any) -> Any:
    """Leave out the entries of a configuration that change no embedding."""
    if not isinstance(config, dict):
        return config
    return {name: _without_noise(value) for name, value in config.items() if not _NO_NUMBERS.fullmatch(name)}


def _describe_tokenizer(folder: Path) -> list[Any]:
    """Return the vocabulary of a tokenizer, or hashes of its files, and its options; an empty list if it has none."""
    if not folder.is_dir():
        return []
    check_files(folder)
    file, options = folder / "tokenizer.json", folder / _TOKENIZER_SETTINGS[0]
    if file.is_file():  # it may also hold the padding and truncation of the last call, which each call sets
        found = check_fields(str(file), read_json(file), {"model": dict})
        names = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
        vocabulary: Any = [found.get(name) for name in names]
    else:
        files = [file for file in sorted(folder.glob("[!.]*")) if file.is_file()]
        vocabulary = [[file.name, file_sha256(file)] for file in files if file.name not in _TOKENIZER_SETTINGS]
    given = check_fields(str(options), read_json(options), {}) if options.is_file() else {}
    return [vocabulary, {name: given[name] for name in _TOKENIZER_OPTIONS if name in given}] if vocabulary else []


def _text_options(pipeline: str) -> dict[str, Any]:
    """Return the options of `encode_prompt` that calling a pipeline has by default; none without transformers."""
    import diffusers

    if not diffusers.utils.is_transformers_available():  # training does without, and the class is a stand-in
        return {}
    kind = getattr(diffusers, pipeline)
    taken, given = (inspect.signature(method).parameters for method in (kind.encode_prompt, kind.__call__))
    return {option: given[option].default for option in _TEXT_OPTIONS if option in taken and option in given}


class TextEncoder:
    """Tokenizer and text encoder of a pipeline, with the options that calling the pipeline has by default.

    Args:
        folder: The pipeline's folder.
        device: Where to run.
        dtype: Type to run in.

    Raises:
        InputError: If the folder is not a pipeline of Wan or Sana, or its tokenizer or text encoder cannot be loaded.
    """

    def __init__(
        self, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        import diffusers
        import transformers

        index = read_pipeline(folder)
        part_of(folder, "tokenizer", "transformers")
        name = part_of(folder, "text_encoder", "transformers")
        kind: Any = getattr(diffusers, index["_class_name"])
        transformers.utils.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer"))
            encoder = getattr(transformers, name).from_pretrained(str(Path(folder) / "text_encoder"), dtype=dtype)
        except _REFUSED as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"the text encoder of {folder} cannot be loaded: {reason}") from None
        encoder = encoder.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self._pipeline = kind(tokenizer=tokenizer, text_encoder=encoder, vae=None, transformer=None, scheduler=None)
        self.options = _text_options(index["_class_name"])
        null, mask = self.encode_null()
        described = describe_text_encoder(folder)
        if described is None:  # loaded from files that no other reader of the folder would find
            raise InputError(f"{folder}: its text encoder or its tokenizer has files of unknown names")
        self.description = {**described, "shape": list(null.shape), "masked": mask is not None}

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Return embeddings [B, L, C] of prompts and, of Sana, the mask [B, L] of the tokens that count."""
        found = self._pipeline.encode_prompt(
            [*prompts], do_classifier_free_guidance=False, device=self.device, **self.options
        )
        return (found[0], found[1]) if len(found) == 4 else (found[0], None)

    @torch.inference_mode()
    def encode_null(self) -> tuple[Tensor, Tensor | None]:
        """Return embedding [L, C] and mask [L] of the empty prompt, as guidance takes it."""
        found = self._pipeline.encode_prompt([""], do_classifier_free_guidance=True, device=self.device, **self.options)
        return (found[2][0], found[3][0]) if len(found) == 4 else (found[1][0], None)

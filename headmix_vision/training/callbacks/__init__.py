"""Callbacks of the training command line.

`SampleGrids` and `SampleFid` need a module of this package's generators, `PredictionsCSV` one of its classifiers; the
others serve any module.
"""

"""Raw clinical files to dataset folders: one module per raw format, found by name.

``prepare`` and ``synthesize`` are the commands of the same names in Python. To add a format, see :class:`Source`.
"""

from manydg.sources._source import (
    SOURCES,
    TWINS,
    AnySource,
    AnyTwin,
    NewSamples,
    Options,
    PublishedCounts,
    RawArgument,
    SamplePredictions,
    Source,
    SourceDocs,
    TrainedOn,
    Twin,
    find_source,
    find_twin,
    option,
    option_help,
    option_types,
    prepare,
    recognize,
    synthesize,
    write_prediction_table,
)

__all__ = [
    "SOURCES",
    "TWINS",
    "AnySource",
    "AnyTwin",
    "NewSamples",
    "Options",
    "PublishedCounts",
    "RawArgument",
    "SamplePredictions",
    "Source",
    "SourceDocs",
    "TrainedOn",
    "Twin",
    "find_source",
    "find_twin",
    "option",
    "option_help",
    "option_types",
    "prepare",
    "recognize",
    "synthesize",
    "write_prediction_table",
]

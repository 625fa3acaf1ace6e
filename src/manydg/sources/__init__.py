"""Raw clinical files to dataset folders: one module per raw format, found by name.

A :class:`Source` turns raw files into dataset folders and new raw files into a trained model's inputs. A :class:`Twin`
writes synthetic raw files in a source's format. Both are found by name through a registry (:data:`SOURCES`,
:data:`TWINS`), and those of other packages join by entry points of the same name (``manydg.sources``,
``manydg.synthetic``). Their options are frozen dataclasses, each field declared once with :func:`option`.
:func:`prepare` and :func:`synthesize` are the commands of the same names in Python.

Nothing heavy is imported here, so that help on the command line is quick.
"""

from __future__ import annotations

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from manydg.errors import ConfigError, DataError, ManyDGError, unknown_name
from manydg.files import Json, ParsedJson, csv_text, write_json
from manydg.registry import Registry

if TYPE_CHECKING:
    from typing import Self

    import numpy as np
    import numpy.typing as npt
    import polars as pl

    from manydg.data.columns import Column
    from manydg.data.info import TargetSpec

Reporter = Callable[[str], None]
"""Shows a line to the user."""


# Options


@dataclass(frozen=True)
class OptionHelp:
    """How an option is shown and checked.

    - ``low``: The smallest value allowed.
    - ``choices``: The values allowed, where they are few.
    - ``metavar``: What help calls the value. Where it ends in ``...``, several words may follow on the command line.
    - ``shown_default``: What help shows as the default, where the value itself (``None``) says too little.
    - ``zero``: Zero on the command line means ``None``: no limit.
    - ``commas``: On the command line several names are one word, separated by commas.
    """

    help: str
    low: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    shown_default: str | None = None
    zero: bool = False
    commas: bool = False


KEEP_HELP = (
    "Column to put beside the predictions; may be repeated. Of a table, any column; of EDF recordings, patient, "
    "session or clock (when each window begins); of a dataset folder or an .npz file, patient or time."
)
"""Help of the option ``keep``, which several sources have."""
_KEY = "option"


def option(default: Any = MISSING, **shown: Any) -> Any:
    """A field of an options dataclass; the keywords are those of :class:`OptionHelp`. Without a default it is required.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Few(Options):
    ...     patients: int = option(10, help="How many patients.", low=1)
    >>> Few.of(patients=3)
    Few(patients=3)
    >>> Few(patients=0)
    Traceback (most recent call last):
    manydg.errors.ConfigError: patients must be at least 1, not 0
    """
    return field(default=default, metadata={_KEY: OptionHelp(**shown)})


@dataclass(frozen=True)
class Options:
    """Base of all options, and the options of what has none; values are checked when they are created."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, shown = getattr(self, entry.name), option_help(entry)
            if value is None:
                continue
            if shown.low is not None and not value >= shown.low:
                raise ConfigError(f"{entry.name} must be at least {shown.low:g}, not {value:g}")
            if shown.choices and value not in shown.choices:
                raise ConfigError(f"{entry.name} is one of {', '.join(shown.choices)}; got '{value}'")

    @classmethod
    def of(cls, **values: object) -> Self:
        """Options from plain values: paths as text, several names as a list or a single text."""
        known = {entry.name: entry for entry in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown_name("option", name, known)
        for name, entry in known.items():
            if entry.default is MISSING and name not in values:
                raise ConfigError(f"the option {name} is needed: {option_help(entry).help}")
        hints = option_types(cls)
        return cls(**{name: _converted(value, hints[name]) for name, value in values.items()})

    def to_json(self) -> dict[str, Json]:
        """The options as JSON values, by name; of paths only the last part."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}


def option_help(entry: Field[Any]) -> OptionHelp:
    """How a field declared by :func:`option` is shown and checked."""
    shown: OptionHelp = entry.metadata[_KEY]
    return shown


def option_types(options: type[Options]) -> dict[str, type]:
    """The type of each option, ``None`` aside; ``tuple`` for several names."""
    kinds: dict[str, type] = {}
    for name, hint in typing.get_type_hints(options).items():
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        hint = inner[0] if isinstance(hint, types.UnionType) else hint
        kinds[name] = typing.get_origin(hint) or hint
    return kinds


def _converted(value: object, kind: type) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is tuple and value is not None:
        return (value,) if isinstance(value, str) else tuple(typing.cast("Sequence[str]", value))
    return value


def _plain(value: Any) -> Json:
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


# What passes between a source, a trained model and the files that people read


@dataclass(frozen=True)
class TrainedOn:
    """What a trained model knows of the data it was trained on.

    Parameters
    ----------
    source : str
        The source's name.
    settings : dict
        ``info["settings"]`` of the training dataset: rates, channels, features, limits.
    vocabularies : dict of str to sequence of str
        Codes by column, in the order of their numbers.
    roles : dict of str to str
        Columns of a table by what they are for: ``patient``, ``time``, ``session``.
    """

    source: str
    settings: ParsedJson = field(default_factory=dict)
    vocabularies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    roles: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class NewSamples:
    """New samples as a trained model's inputs.

    Parameters
    ----------
    columns : dict of str to column
        Each with as many rows as there are samples.
    rows : DataFrame
        What tells the samples apart in the table of predictions: visit, stay, row, epoch.
    patients : array ``(samples,)``
    times : array ``(samples,)``, optional
    origin : path, optional
        The file they are from, where every file gets predictions of its own.
    """

    columns: dict[str, Column]
    rows: pl.DataFrame
    patients: npt.NDArray[Any]
    times: npt.NDArray[np.float64] | None = None
    origin: Path | None = None


@dataclass(frozen=True)
class SamplePredictions:
    """What a model says of some samples.

    Parameters
    ----------
    target : TargetSpec
        Its names are the columns of ``probabilities``.
    probabilities : array ``(samples, K)``
    decisions : list of str
        The class of each sample, or its labels as :func:`manydg.predict.joined_names` writes them, or the predicted
        value; ``None`` where there is no prediction.
    threshold : float, optional
        The probability from which a label counts as present, where that is how it decides.
    trust : dict of str to sequence
        Further columns, one entry per sample: calibrated probabilities, prediction sets, novelty.
    """

    target: TargetSpec
    probabilities: npt.NDArray[np.float32]
    decisions: Sequence[str | None]
    threshold: float | None
    trust: Mapping[str, Sequence[Any]]

    def some(self, rows: slice) -> SamplePredictions:
        """Those of some samples."""
        trust = {name: values[rows] for name, values in self.trust.items()}
        return SamplePredictions(self.target, self.probabilities[rows], self.decisions[rows], self.threshold, trust)


@dataclass(frozen=True)
class PublishedCounts:
    """The counts that the paper states for a dataset.

    Parameters
    ----------
    edition : str
        Which data the counts are about.
    counts : dict of str to int
        By name: ``patients``, ``samples``, or the number of codes of a vocabulary.
    shares : dict of str to float
        Share of each label, as a fraction.
    labels_per_sample : dict of str to float
        ``mean`` and ``most`` labels of a sample, for multi-label targets.
    at_least : frozenset of str
        Counts that are only known from below.
    notes : dict of str to str
        What is known about a count that readers trip over.
    """

    edition: str
    counts: Mapping[str, int]
    shares: Mapping[str, float] = field(default_factory=dict)
    labels_per_sample: Mapping[str, float] = field(default_factory=dict)
    at_least: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RawArgument:
    """How the raw files are named on the command line: an argument, or an option where ``flag`` is given."""

    help: str = "Folder with the raw files."
    name: str = "raw"
    flag: str | None = None


@dataclass(frozen=True)
class SourceDocs:
    """What the tables of README.md and docs/datasets.md say of a source.

    Parameters
    ----------
    predicts : str
        From what is predicted what.
    target : str
        The kind of target.
    page : str
        Where docs/datasets.md sends the reader, in Markdown.
    task : str, optional
        The task's name in the README's table of clinical tasks; without it, the source is not in that table.
    files : str, optional
        The raw files, for the same table.
    """

    predicts: str
    target: str
    page: str
    task: str | None = None
    files: str | None = None


# The two base classes


O = TypeVar("O", bound=Options)  # noqa: E741 - as in Source[O, P]
P = TypeVar("P", bound=Options)


class Source(ABC, Generic[O, P]):
    """One raw format.

    A module of ``manydg.sources`` holds one; ``sleep_edf.py`` would be ``manydg prepare sleep-edf``. The first line of
    the module's docstring is its help.

    Attributes
    ----------
    name : str
        As in ``manydg prepare NAME``, and as datasets name their origin.
    options_class, prediction_options_class : type of Options
        What may be asked of :meth:`prepare`, and of :meth:`for_prediction`.
    raw : RawArgument
        What ``prepare`` reads.
    parallel : bool
        Whether files can be read by several processes.
    self_explanatory : bool
        Whether raw files can be prepared without asking anyone (see :meth:`options_for`).
    general : bool
        Whether other sources read some of the same files more specifically; they are asked first whose files some are.
    published : PublishedCounts or None
        What the paper counted in these data.
    docs : SourceDocs or None
    """

    name: ClassVar[str]
    options_class: ClassVar[type[Options]] = Options
    prediction_options_class: ClassVar[type[Options]] = Options
    raw: ClassVar[RawArgument] = RawArgument()
    parallel: ClassVar[bool] = True
    self_explanatory: ClassVar[bool] = True
    general: ClassVar[bool] = False
    published: ClassVar[PublishedCounts | None] = None
    docs: ClassVar[SourceDocs | None] = None

    @abstractmethod
    def looks_like(self, folder: Path) -> bool:
        """Whether a folder holds raw files of this format, judged by names alone."""

    @abstractmethod
    def prepare(self, raw: Path, out: Path, options: O, *, workers: int = 1, overwrite: bool = False) -> Path:
        """Make a dataset folder from raw files.

        Parameters
        ----------
        raw : path
        out : path
            The dataset folder to write; nothing appears there before all of it is ready.
        options : Options
        workers : int
            Processes that read files; ignored where ``parallel`` is false.
        overwrite : bool
            Replace a dataset folder that exists.

        Returns
        -------
        Path
            The dataset folder.
        """

    @abstractmethod
    def for_prediction(self, raw: Path, trained: TrainedOn, options: P) -> Iterator[NewSamples]:
        """New raw files through the same preparation, with the training vocabularies and settings.

        Nothing is asked of the files that only training needs. Samples come in one piece, or in one per file where
        each file gets predictions of its own.
        """

    def write_predictions(self, folder: Path, samples: NewSamples, predictions: SamplePredictions) -> list[Path]:
        """Write predictions for people to read; by default one CSV table, a line per sample."""
        return [write_prediction_table(folder, samples.rows, predictions)]

    def options_for(self, raw: Path, nearby: Path, report: Reporter) -> O:
        """The options that raw files themselves suggest, where nobody can be asked.

        Parameters
        ----------
        raw : path
        nearby : path
            Where else to look for what the files alone do not say.
        report : callable
            Shows the user a line about what was decided.
        """
        return typing.cast("O", self.options_class())

    def notes_on(self, options: Mapping[str, Json]) -> list[str]:
        """Lines for the user about a finished dataset, from the options in its provenance."""
        return []

    def synthesize(self, out: Path, **options: object) -> Path:
        """Write synthetic raw files in this format; see :class:`Twin`."""
        return synthesize(self.name, out, **options)

    def check_trained_on(self, trained: TrainedOn) -> None:
        """Raise if a model was trained on data of another source."""
        if trained.source != self.name:
            raise DataError(f"the model was trained on {trained.source} data; these are {self.name} files")


class Twin(ABC, Generic[O]):
    """Synthetic raw files in the format of the source of the same name.

    Attributes
    ----------
    name : str
        The source's.
    options_class : type of Options
        ``patients`` and ``seed`` among them.
    scales : dict of str to Options
        How much to write for ``manydg paper --synthetic --scale NAME``; empty where the paper has no such data.
    """

    name: ClassVar[str]
    options_class: ClassVar[type[Options]]
    scales: ClassVar[Mapping[str, Options]] = {}

    @abstractmethod
    def write(self, out: Path, options: O) -> Path:
        """Write the files to a folder that does not exist yet, or is empty; returns it."""

    def create(self, out: Path, options: O) -> Path:
        """Write the files and mark them as synthetic, so that a dataset prepared from them says what it is."""
        folder = self.write(out, options)
        mark_synthetic(folder)
        return folder

    def describe(self, out: Path, options: O) -> str:
        """A line for the user about what was written."""
        return f"wrote {out}"


AnySource = Source[Any, Any]
AnyTwin = Twin[Any]
SOURCES: Registry[AnySource] = Registry("source", "manydg.sources", Source)
TWINS: Registry[AnyTwin] = Registry("synthetic twin", "manydg.synthetic", Twin)


def find_source(name: str) -> AnySource:
    """A source by its name."""
    return SOURCES.get(name)()


def find_twin(name: str) -> AnyTwin:
    """A synthetic twin by the name of its source."""
    return TWINS.get(name)()


def prepare(source: str, raw: str | Path, out: str | Path, *, workers: int = 1, overwrite: bool = False,
            **options: object) -> Path:  # fmt: skip
    """Make a dataset folder from raw files: ``manydg prepare`` in Python.

    Parameters
    ----------
    source : str
        As in ``manydg prepare SOURCE``; its ``--help`` lists the options.
    raw, out : path
    workers : int
        Processes that read files.
    overwrite : bool
        Replace a dataset folder that exists.
    **options
        Options of the source, with underscores.

    Returns
    -------
    Path
        The dataset folder.
    """
    chosen = find_source(source)
    asked = chosen.options_class.of(**options)
    return chosen.prepare(Path(raw), Path(out), asked, workers=workers, overwrite=overwrite)


def synthesize(source: str, out: str | Path, **options: object) -> Path:
    """Write synthetic raw files in a source's format: ``manydg synthesize`` in Python.

    Parameters
    ----------
    source : str
        As in ``manydg synthesize SOURCE``.
    out : path
        A folder that does not exist yet.
    **options
        ``patients``, ``seed`` and whatever else ``manydg synthesize SOURCE --help`` lists.
    """
    twin = find_twin(source)
    return twin.create(Path(out), twin.options_class.of(**options))


SYNTHETIC = "synthetic.json"
"""The file that marks a folder of raw files as synthetic."""


def mark_synthetic(folder: Path) -> None:
    """Mark a folder of raw files as synthetic; one that is marked stays as it is."""
    if not (folder / SYNTHETIC).exists():
        about = "These are not data of real patients: 'manydg synthesize' made them up."
        write_json(folder / SYNTHETIC, {"synthetic": True, "about": about})


def is_synthetic(raw: Path) -> bool:
    """Whether raw files are synthetic: their folder is marked so, or one around it or not far below it."""
    path = raw.resolve()
    folder = path if path.is_dir() else path.parent
    if any((around / SYNTHETIC).is_file() for around in (folder, *folder.parents[:2])):
        return True
    return path.is_dir() and any(any(folder.glob(f"{below}{SYNTHETIC}")) for below in ("*/", "*/*/"))


def recognize(folder: Path) -> AnySource | None:
    """The source whose raw files a folder holds; ``None`` where it holds none, or only further down."""
    sources = []
    for name in SOURCES.names():
        # A plug-in that cannot be imported is passed by.
        with suppress(ManyDGError):
            sources.append(find_source(name))
    for source in sorted(sources, key=lambda source: source.general):
        with suppress(ManyDGError, OSError):
            if source.looks_like(folder):
                return source
    return None


def write_prediction_table(
    folder: Path, rows: pl.DataFrame, predictions: SamplePredictions, file: str = "predictions.csv"
) -> Path:
    """Write a table of predictions, a line per sample.

    Its columns are those of :func:`prediction_table`. Text that a spreadsheet would compute is kept text
    (:func:`manydg.files.csv_text`).
    """
    import polars as pl

    table = prediction_table(rows, predictions)
    texts = [column.name for column in table if column.dtype == pl.String]
    plain = {name: [None if text is None else csv_text(text) for text in table[name]] for name in texts}
    table = table.with_columns(pl.Series(name, cells, dtype=pl.String) for name, cells in plain.items())
    path = folder / file
    table.rename({name: csv_text(name) for name in table.columns}).write_csv(path)
    return path


def prediction_table(rows: pl.DataFrame, predictions: SamplePredictions) -> pl.DataFrame:
    """A table of predictions, a row per sample.

    Its columns are those of ``rows``, then ``predicted``, ``threshold`` where there is one, ``p_NAME`` for each class
    or label (none for a regression target), and how far to trust it.
    """
    import polars as pl

    threshold, target = predictions.threshold, predictions.target
    numeric = target.kind == "regression"
    names, decided = () if numeric else target.names, pl.Series("predicted", predictions.decisions, dtype=pl.String)
    return rows.with_columns(
        decided.cast(pl.Float64) if numeric else decided,
        *([] if threshold is None else [pl.lit(float(f"{threshold:.6g}")).alias("threshold")]),
        *(
            pl.Series(f"p_{name}", predictions.probabilities[:, k].round(5), nan_to_null=True)
            for k, name in enumerate(names)
        ),
        *(pl.Series(name, values) for name, values in predictions.trust.items()),
    )

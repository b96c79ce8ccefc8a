"""From ratings on disk to files that models are trained from: join, categorify, label, shuffle; on one rank or many.

A workflow learns vocabularies from the training rows, and applies them to any other rows::

    workflow = Workflow(
        Join(movies, on="movie", columns="genres"),
        Categorify("user", "movie", "genres", min_count=2),
        Compute(label=pl.col("rating") > 3),
        Drop("rating", "timestamp"),
    )
    workflow.fit("ratings/train/*.parquet")
    workflow.write("ratings/train/*.parquet", "out/train", num_files=8)
    workflow.write("ratings/valid.parquet", "out/valid", num_files=2, shuffle=False)
    workflow.save("out/workflow")

In a function that runs on all ranks, `fit` and `write` divide the rows among them, with the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import torch

from .. import ranks
from ..io.folders import atomic_folder
from ..io.frames import Tabular, require_frame
from . import output, saving
from .drawing import Graph, graph
from .fitting import as_in_fit, casts, declared
from .inputs import Input, Reading, Source, opened, row_bytes, rows_in
from .learning import learn, numbered, with_rows
from .ops.rows import RowStep
from .ops.step import ROW, State, Step, type_name
from .pipeline import needed, pipeline, uses_row_numbers
from .vocabulary import Vocabulary

_POSITION = 4  # bytes of a row's position in the output


class Workflow:
    """Steps that are fitted to rows and then applied to these and other rows.

    Args:
        *steps: The steps, in the order in which they are applied: `Join`, `Categorify`, `Compute`, `Drop`,
            `HashedCross`; those that change single values, `FillMissing`, `Log`, `Clip`, `Round`, `Bucketize`,
            `ListSlice`; those that learn numbers, `Normalize`, `NormalizeMinMax`, `TargetEncoding`, `JoinGroupby`; and
            those about rows, `Filter`, `DifferenceLag`.
        tags: A mapping from output columns to words such as "user" or "target", which `schema` shows and which are
            saved. None: no words.

    Attributes of a fitted workflow:
        inputs: Names and types (``int64``, ``list[string]``) of the columns that `fit` saw.
        outputs: Names and types of the columns that the steps make.
        state: The learned state of its steps.
        rows: The number of rows that `fit` saw and no `Filter` removed, including the rows of the `previous` workflow.

    `fitted` is True after `fit`.

    Raises:
        TypeError: An argument is not a step.
        ValueError: A column is categorified or normalized twice, or tags are not lists of texts.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.datasets import synthetic_ratings
        >>> from nbdist.recsys.etl import Categorify, Compute, Drop, Workflow
        >>> ratings = synthetic_ratings(n_users=50, n_items=20, n_ratings=400).frame
        >>> workflow = Workflow(
        ...     Categorify("user", "movie"),
        ...     Compute(label=pl.col("rating") > 3),
        ...     Drop("rating", "timestamp"),
        ... )
        >>> workflow = workflow.fit(ratings)
        >>> [str(file) for file in workflow.write(ratings, "train", num_files=2)]
        ['train/part-00000.parquet', 'train/part-00001.parquet']
        >>> workflow.outputs
        {'user': 'int64', 'movie': 'int64', 'label': 'bool'}
        >>> workflow.embedding_sizes
        {'user': (52, 15), 'movie': (22, 9)}
        >>> workflow.save("workflow")
        >>> Workflow.load("workflow").rows
        400
    """

    rows: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    state: State

    def __init__(self, *steps: Step, tags: Mapping[str, Sequence[str]] | None = None) -> None:
        for step in steps:
            if not isinstance(step, Step):
                raise TypeError(
                    f"a workflow consists of steps such as Join, Categorify, Compute and Drop, not of {step!r}"
                )
        learned = [(type(step).__name__, name) for step in steps for name in step.learns]
        if twice := {one for one in learned if learned.count(one) > 1}:
            kind, name = min(twice)
            raise ValueError(f"{name!r} is learned by two {kind} steps: leave one of them out")
        for column, words in (tags or {}).items():
            if isinstance(words, str) or not all(isinstance(word, str) for word in words):
                raise ValueError(f"`tags` must have a list of texts for each column, got {words!r} for {column!r}")
        self.steps, self.tags = steps, {column: list(words) for column, words in (tags or {}).items()}
        self.fitted = False

    def fit(
        self,
        source: Source,
        *,
        previous: Workflow | str | os.PathLike[str] | None = None,
        memory_bytes: int = 1 << 30,
        polars_engine: str = "cpu",
        progress: bool = True,
    ) -> Workflow:
        """Learn vocabularies and numbers. This takes one pass over the rows for each step that learns, and one for a
        `Filter`.

        Args:
            source: Parquet files (a path, a folder, a glob pattern, a URI, or several), including the columns of
                folders with names like ``column=value``; a frame of polars or pandas, an Arrow table, or a dict of
                columns. A lazy frame is first streamed to a temporary file.
            previous: A fitted workflow, or the folder of a saved one, whose vocabularies will grow. All its codes stay,
                and new values in `source` get the codes that follow, the most frequent first. Columns that it does not
                categorify get new vocabularies. `min_count` is applied to the rows of `source` alone. Means, sums and
                extremes are over the rows of both.
            memory_bytes: The number of bytes that a rank may use for rows. Counted values need further memory.
            polars_engine: "cpu", or "gpu" for polars' GPU engine, which needs cudf-polars.
            progress: Whether to show a progress bar. On several ranks, rank 0 shows it.

        Returns:
            The workflow itself.

        Raises:
            FileNotFoundError, ValueError: A file or column is missing, a step cannot use the type of a column, a file
                has a different schema than the first, or there are no rows; the error names file and column. Or codes
                of `previous` cannot be kept.
        """
        chosen = _engine(polars_engine)
        if isinstance(previous, (str, os.PathLike)):
            previous = Workflow.load(previous)
        if previous is not None and not isinstance(previous, Workflow):
            raise TypeError(
                f"`previous` must be a fitted workflow, or the folder of one, got {type(previous).__name__}"
            )
        with opened(source) as given:
            before = None if previous is None else previous._digest()
            ranks.agree("fit", rows=given.rows, steps=repr(self), schema=str(given.schema), previous=before)
            schemas = [given.schema]
            for step in self.steps:
                schemas.append(step.check(schemas[-1], given.where))
            known = State() if previous is None else previous.state
            for step, schema in zip(self.steps, schemas, strict=False):
                step.check_growth(schema, known)
            reading = Reading(rows_in(memory_bytes, row_bytes(given.head(given.schema.names()))), chosen, progress)
            self.state, rows = learn(self.steps, schemas, given, reading, known)
            self.rows = rows + (0 if previous is None else previous.rows)
            self.inputs, self.outputs = (
                {name: type_name(dtype) for name, dtype in schema.items()} for schema in (schemas[0], schemas[-1])
            )
        self.fitted = True
        return self

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """The `Vocabulary` of each categorified column."""
        return self.state.vocabularies

    def transform(self, frame: Tabular, columns: Sequence[str] | None = None) -> pl.LazyFrame:
        """Apply the steps to a frame, in this process alone. All rows are kept, in their order.

        Use it for rows to predict, and `write` for training rows: a `Filter` is skipped, and a `TargetEncoding` gives
        the means of all training rows.

        Args:
            frame: A frame of polars or pandas, an Arrow table, or a dict of columns. Only the columns that the wanted
                columns are made from are needed: rows to predict need no label. Integers may have a different type than
                in `fit`, or be floats without a fraction; booleans may be 0 and 1.
            columns: The wanted `outputs`, in this order. None: all.

        Returns:
            A lazy frame of the `columns`: nothing is computed until its `collect` is called.

        Raises:
            RuntimeError: The workflow is not fitted.
            TypeError: `frame` is not a frame.
            ValueError: A name in `columns` is not an output; or a column that is needed is missing, or has a different
                type than in `fit`. The error names the column.
        """
        wanted = self._wanted(columns)
        rows = require_frame(frame, "the frame").lazy()
        rows = rows.with_columns(casts(rows.collect_schema(), self.needs(wanted), "the frame"))
        return declared(pipeline(self.steps, self.state, wanted)(rows), self.outputs, wanted)

    def write(
        self,
        source: Source,
        folder: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        training: bool | None = None,
        num_files: int = 8,
        shuffle: bool = True,
        seed: int = 0,
        row_group_size: int = 1 << 17,
        compression: str = "zstd",
        overwrite: bool = False,
        memory_bytes: int = 1 << 30,
        polars_engine: str = "cpu",
        progress: bool = True,
    ) -> list[Path]:
        """Apply the steps to all rows and write them to ``folder/part-00000.parquet`` and so on.

        The folder appears when all files are complete. The bytes of the files depend on the rows and their order in
        `source`, the workflow, `num_files`, `shuffle`, `seed`, `row_group_size` and `compression`. They do not depend
        on the number of ranks, `memory_bytes`, or the division of the source into files.

        Ranks write different files: use at least as many files as ranks. A shuffle on several ranks, or of more rows
        than fit into a quarter of `memory_bytes`, needs as much disk space in `folder` as the needed columns take in
        memory.

        Args:
            source: As for `fit`.
            columns: The `outputs` to write, in this order. None: all. Input columns that these do not depend on are not
                read, and may be missing.
            training: Whether these are the rows of `fit`, in the same order. It must be given if a step is a
                `TargetEncoding`.
            num_files: The number of files. If there are fewer rows, each row gets a file. The files differ by at most
                one row.
            shuffle: Whether to write the rows in a random order over all files; otherwise in the order of `source`.
            seed: The seed of the random order.
            row_group_size: The number of rows in a row group. Choose a small number if the files will be larger than
                the loader's memory.
            compression: The compression of the files: "zstd", "snappy", "lz4", "gzip", "brotli" or "none".
            overwrite: Whether to replace a folder of an earlier `write`.
            memory_bytes: The number of bytes that a rank may use for rows. Vocabularies and joined tables need further
                memory.
            polars_engine: As for `fit`.
            progress: As for `fit`.

        Returns:
            The files, in order.

        Raises:
            RuntimeError: The workflow is not fitted.
            FileExistsError: `folder` exists, or another process is writing it.
            FileNotFoundError, ValueError: The errors of `transform` and `fit`, before anything is written; or
                `training` is missing although it is needed, or is given for other rows.
        """
        wanted, chosen = self._wanted(columns), _engine(polars_engine)
        described = output.OutputFiles(num_files, row_group_size, compression, seed if shuffle else None)
        if training is None and uses_row_numbers(self.steps, wanted):
            raise ValueError(
                "`training` must be given for a workflow with a TargetEncoding: True for the rows that it was fitted "
                "to, "
                "which then get the means of other rows, and False for any other rows"
            )
        alike = {"columns": wanted, "folder": os.fspath(folder), "memory_bytes": memory_bytes, "training": training}
        with opened(source) as given:
            given = as_in_fit(given, self._inputs(self.steps, wanted, bool(training)))
            ranks.agree("write", workflow=self._digest(), rows=given.rows, **asdict(described), **alike)
            with atomic_folder(folder, ("part-*.parquet",), overwrite) as scratch:
                given, rest = self._rows(given, wanted, bool(training), memory_bytes, chosen, progress)
                steps = pipeline(rest, self.state, wanted, bool(training))
                if training and uses_row_numbers(rest, wanted):
                    width = row_bytes(given.head(given.schema.names()))
                    reading = Reading(rows_in(memory_bytes, width), chosen, progress)
                    given = numbered(given, rest, self.state, wanted, reading)
                names = needed(rest, wanted)[0] | {ROW}
                raw = pl.Schema({name: dtype for name, dtype in given.schema.items() if name in names})
                raw = raw or pl.Schema([next(iter(given.schema.items()))])  # any, for the number of rows

                def apply(frame: pl.DataFrame) -> pl.DataFrame:
                    return declared(steps(frame.lazy()), self.outputs, wanted).collect(engine=chosen)

                sample = given.head(raw.names())
                size = rows_in(memory_bytes, row_bytes(sample) + row_bytes(apply(sample)))
                whole = given.rows * (row_bytes(sample) + _POSITION) < memory_bytes // 4
                described = replace(described, num_files=min(num_files, given.rows))
                output.write(given, raw, apply, described, scratch, size, whole, chosen, progress)
        return [Path(folder) / name for name in described.names]

    def _rows(
        self, given: Input, wanted: Sequence[str], training: bool, memory_bytes: int, engine: Any, progress: bool
    ) -> tuple[Input, Sequence[Step]]:
        """Apply the steps up to the last one that depends on other rows, with `Filter`s. Return the rows after it,
        and the remaining steps.
        """
        if not any(isinstance(step, RowStep) for step in self.steps):
            return given, self.steps
        columns, done = needed(self.steps, wanted, training), 0
        size = rows_in(memory_bytes, row_bytes(given.head(sorted(columns[0]) or given.schema.names()[:1])))
        reading = Reading(size, engine, progress)
        for i, step in enumerate(self.steps):
            if isinstance(step, RowStep) and (step.selects or columns[i + 1].intersection(step.adds)):
                before = sorted(columns[i])
                given = with_rows(given, self.steps[done:i], step, self.state, before, training, reading)
                done = i + 1
        return given, self.steps[done:]

    @property
    def embedding_sizes(self) -> dict[str, tuple[int, int]]:
        """The number of rows and columns of an embedding table for each categorified column.

        There are as many rows as codes, and ``min(600, round(1.6 * rows ** 0.56))`` columns, the rule of thumb of
        fastai's tabular models (`fastai.tabular.model.emb_sz_rule`).
        """
        self._wanted(None)
        sizes = {name: vocabulary.size for name, vocabulary in self.vocabularies.items()}
        return {name: (size, min(600, round(1.6 * size**0.56))) for name, size in sizes.items()}

    @property
    def schema(self) -> pl.DataFrame:
        """A row for each output column: `column`, `dtype`, `codes` (the number of codes) and `tags`."""
        self._wanted(None)
        codes: dict[str, int | None] = {}
        for step in self.steps:
            codes |= {name: step.num_codes(name, codes.get(name), self.state) for name in step.adds}
        if foreign := self.tags.keys() - self.outputs.keys():
            raise ValueError(f"`tags` has {min(foreign)!r}, which is not among the outputs, {', '.join(self.outputs)}")
        rows = [(name, kind, codes.get(name), self.tags.get(name, [])) for name, kind in self.outputs.items()]
        types: dict[str, Any] = {"column": pl.String, "dtype": pl.String, "codes": pl.Int64, "tags": pl.List(pl.String)}
        return pl.DataFrame(rows, schema=types, orient="row")

    @property
    def graph(self) -> Graph:
        """The steps and the columns between them, which a notebook draws; `graph.mermaid` is text."""
        return graph(self.steps, list(self.outputs) if self.fitted else [])

    def describe(self) -> dict[str, Any]:
        """Describe the fitted steps as plain data, the content of ``workflow.json``."""
        self._wanted(None)
        tags = {"tags": self.tags} if self.tags else {}
        return saving.describe(self.steps, self.state, self.inputs, self.outputs, self.rows) | tags

    def needs(self, columns: Sequence[str]) -> dict[str, str]:
        """Return the names and types of the `inputs` on which some of the `outputs` depend."""
        return self._inputs([step for step in self.steps if not step.selects], self._wanted(columns))

    def _inputs(self, steps: Sequence[Step], wanted: Sequence[str], training: bool = False) -> dict[str, str]:
        there = needed(steps, wanted, training)[0]
        return {name: kind for name, kind in self.inputs.items() if name in there}

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Save the fitted workflow in a folder of JSON and Parquet files, which appears when it is complete.

        Args:
            folder: The folder to write. On several ranks, rank 0 writes it.
            overwrite: Whether to replace a saved workflow.

        Raises:
            RuntimeError: The workflow is not fitted.
            FileExistsError: `folder` exists.
        """
        description = self.describe()
        with atomic_folder(folder, saving.FILES, overwrite) as scratch:
            if ranks.rank() == 0:
                saving.write(scratch / "whole", description, self.steps, self.state)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Workflow:
        """Load the workflow that was saved in a folder. Runs no code from the files.

        Raises:
            FileNotFoundError, ValueError: A file is missing, or was not written by `save`. The error names the file.
        """
        description, steps, state = saving.read(Path(folder).expanduser())
        workflow = cls(*steps, tags=description.get("tags"))
        workflow.inputs, workflow.outputs = description["inputs"], description["outputs"]
        workflow.rows, workflow.state, workflow.fitted = description["rows"], state, True
        return workflow

    def __repr__(self) -> str:
        return f"Workflow({', '.join(map(repr, self.steps))})"

    def _wanted(self, columns: Sequence[str] | None) -> list[str]:
        """Return the requested columns; raise if one does not exist, or if the workflow is not fitted."""
        if not self.fitted:
            raise RuntimeError("the workflow is not fitted: call fit() with the training rows first, or load() one")
        if columns is None:
            return list(self.outputs)
        if isinstance(columns, str) or not columns:
            raise ValueError(f"`columns` must be a list of columns, or None for all, got {columns!r}")
        for name in columns:
            if name not in self.outputs:
                raise ValueError(f"columns: {name!r} is not among the outputs, {', '.join(map(repr, self.outputs))}")
        return list(columns)

    def _digest(self) -> str:
        return hashlib.blake2b(json.dumps(self.describe()).encode(), digest_size=8).hexdigest()


def _engine(name: str) -> Any:
    """Return polars' engine. An operation that the GPU engine lacks raises an error; it is not done on the CPU."""
    if name == "cpu":
        return "streaming"
    if name != "gpu":
        raise ValueError(f"`polars_engine` must be 'cpu' or 'gpu', got {name!r}")
    if find_spec("cudf_polars") is None:
        raise ImportError(
            "polars_engine='gpu' needs an NVIDIA GPU and cudf-polars (pip install cudf-polars-cu12 --extra-index-url "
            "https://pypi.nvidia.com); polars_engine='cpu' does not"
        )
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    return pl.GPUEngine(device=device, raise_on_fail=True)

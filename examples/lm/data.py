"""Text as tokens: the standard library's source, a text file, a folder, token files.

The batch of a step depends only on (seed, step), so a resumed run sees what it would
have seen. Files are opened read-only.
"""

import dataclasses
import pathlib
import sysconfig

import numpy as np

from lm.errors import UserError

HELD_OUT = 10  # every tenth file, or the last tenth of a single one, is for validation
BYTE_VOCAB = 256
READ_AHEAD = 1_000_000  # tokens of a token file that are checked before a run begins
GPT2_VOCAB = 50_304  # 50,257 rounded up to a multiple of 128
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 256 * 4
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token arrays from which windows are cut; no window crosses an array's end."""

    arrays: tuple[np.ndarray, ...]
    vocab: int  # a token at or above it is refused

    @property
    def size(self) -> int:
        return sum(len(a) for a in self.arrays)

    def windows(self, length: int) -> int:
        """How many windows of `length` tokens there are."""
        return sum(max(0, len(a) - length + 1) for a in self.arrays)

    def cut(self, positions: np.ndarray, length: int) -> np.ndarray:
        """int32[n, length]: the windows numbered `positions` (0 to windows - 1)."""
        counts = [max(0, len(a) - length + 1) for a in self.arrays]
        ends = np.cumsum(counts)
        which = np.searchsorted(ends, positions, side="right")
        rows = np.empty((len(positions), length), np.int32)
        for row, (position, file) in enumerate(zip(positions, which)):
            start = position - (ends[file] - counts[file])
            rows[row] = self.arrays[file][start : start + length]
        self._refuse_outside(rows)
        return rows

    def check(self) -> None:
        """Refuses what is outside the vocabulary: in a whole text, and in the first
        million tokens of a token file. `cut` does so in the rest."""
        for array in self.arrays:
            if self.vocab <= np.iinfo(array.dtype).max:
                mapped = isinstance(array, np.memmap)
                self._refuse_outside(array[:READ_AHEAD] if mapped else array)

    def _refuse_outside(self, tokens: np.ndarray) -> None:
        largest = tokens.max()
        if largest >= self.vocab:
            raise UserError(
                f"--data: token {largest} is outside the vocabulary of {self.vocab} "
                f"tokens: give a larger --vocab-size"
            )

    def unigram_entropy(self) -> float:
        """Entropy in nats of the token counts, of the first 10 million tokens."""
        counts, left = np.zeros(self.vocab, np.int64), 10_000_000
        for array in self.arrays:
            counts += np.bincount(array[:left], minlength=self.vocab)[: self.vocab]
            left = max(0, left - len(array))
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, and where they came from."""

    train: Tokens
    val: Tokens
    source: str

    @property
    def vocab(self) -> int:
        return self.train.vocab

    def positions(self, seed: int, step: int, count: int, length: int) -> np.ndarray:
        """Which training windows step number `step` reads: int64[count]."""
        rng = np.random.default_rng((seed, step))
        return rng.integers(0, self.train.windows(length), size=count)

    def val_positions(self, batch: int, count: int, length: int) -> np.ndarray:
        """Windows of validation batch number `batch`: int64[count].

        Side by side over the text, starting again at its end where it is short.
        """
        start = np.arange(batch * count, (batch + 1) * count, dtype=np.int64)
        return start * length % self.val.windows(length)


def load(path: str | None, length: int, vocab: int | None = None) -> Corpus:
    """The corpus at `path`; None: the source text of the running Python's library.

    Args:
        path: a text file, a folder of text files, a token file (.bin) or a folder of
            them. None: the standard library.
        length: tokens in a window; a corpus without one such window is refused.
        vocab: size of the vocabulary. None: 256 for text, 50304 for token files.

    Raises:
        UserError: missing, empty, malformed, too short, or outside the vocabulary.
    """
    if path is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        files = [
            file
            for file in sorted(root.rglob("*.py"))
            if not SKIPPED & set(file.relative_to(root).parts)
        ]
        corpus = _text(files, f"the Python standard library, {root}", vocab)
    else:
        files = _files(pathlib.Path(path))
        if any(file.suffix == ".bin" for file in files):
            corpus = _token_files(files, path, vocab)
        else:
            corpus = _text(files, path, vocab)
    for name, tokens in (("training", corpus.train), ("validation", corpus.val)):
        if not tokens.windows(length):
            raise UserError(
                f"--data {corpus.source}: the {name} part has {tokens.size} tokens, "
                f"too few for one sequence of {length}: give more text or a smaller "
                f"--seq-len"
            )
        tokens.check()
    return corpus


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if not path.exists():
        raise UserError(f"--data {path}: no such file or folder")
    if path.is_file():
        return [path]
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    if not files:
        raise UserError(f"--data {path}: the folder holds no files")
    return files


def _read(file: pathlib.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read ({error.strerror})") from None


def _text(files: list[pathlib.Path], source: str, vocab: int | None) -> Corpus:
    texts = []
    for file in files:
        text = _read(file)
        if b"\0" in text:
            raise UserError(
                f"--data {file}: not a text file (it holds a zero byte); token files "
                f"must be named *.bin"
            )
        if text:
            texts.append(np.frombuffer(text, np.uint8))
    if not texts:
        raise UserError(f"--data {source}: no text in it (all files are empty)")
    train, val = _split(texts)
    vocab = vocab or BYTE_VOCAB
    return Corpus(
        Tokens((np.concatenate(train),), vocab),
        Tokens((np.concatenate(val),), vocab),
        source,
    )


def _split(arrays: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    if len(arrays) == 1:
        cut = len(arrays[0]) - len(arrays[0]) // HELD_OUT
        return [arrays[0][:cut]], [arrays[0][cut:]]
    if len(arrays) < HELD_OUT:
        return arrays[:-1], arrays[-1:]
    train = [a for i, a in enumerate(arrays) if i % HELD_OUT != HELD_OUT - 1]
    return train, arrays[HELD_OUT - 1 :: HELD_OUT]


def _token_files(files: list[pathlib.Path], source: str, vocab: int | None) -> Corpus:
    """modded-nanogpt's token files; those with "val" in their name are held out."""
    files = [file for file in files if file.suffix == ".bin"]
    vocab = vocab or GPT2_VOCAB
    val = [_token_file(f) for f in files if "val" in f.name]
    train = [_token_file(f) for f in files if "val" not in f.name]
    if not val:
        train, val = _split(train)
    elif not train:
        raise UserError(f"--data {source}: only validation files (*val*.bin) in it")
    return Corpus(Tokens(tuple(train), vocab), Tokens(tuple(val), vocab), source)


def _token_file(file: pathlib.Path) -> np.ndarray:
    """uint16 tokens of one file, mapped, not read: 256 int32 of header, then tokens."""
    try:
        size = file.stat().st_size
        if size < HEADER_BYTES:
            raise UserError(
                f"--data {file}: {size} bytes, less than the header of {HEADER_BYTES}"
            )
        with open(file, "rb") as opened:
            magic, version, count = np.fromfile(opened, "<i4", 3).tolist()
        if magic != MAGIC or version != VERSION:
            raise UserError(
                f"--data {file}: header starts with {magic}, {version}; a token file "
                f"of uint16 starts with {MAGIC}, {VERSION}"
            )
        found = (size - HEADER_BYTES) / 2
        if count != found or count == 0:
            raise UserError(
                f"--data {file}: the header says {count} tokens, the file holds "
                f"{found:g}"
            )
        return np.memmap(file, "<u2", mode="r", offset=HEADER_BYTES)
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read ({error.strerror})") from None

"""Jane Austen's six novels as plain text: read from Debian's package, cleaned, split in two.

The text is in the public domain and is not kept in this repository. To make it:

    apt-get download r-cran-janeaustenr
    python -m examples.tiny_qwen3.prose r-cran-janeaustenr_*.deb .corpus

That writes one `<novel>.txt` a novel. Knows nothing of tokens, dialogues or training.
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from examples.tiny_qwen3.example import is_held_out

CHAPTER_MARK = "\n\n***\n\n"
HELD_OUT_CHAPTERS = 20  # one chapter in so many
_DATABASE = "site-library/janeaustenr/data/Rdata.rdb"
_HEADING = re.compile(r"(CHAPTER|VOLUME)\s+([IVXLC]+|\d+)\.?", re.IGNORECASE)
_END = re.compile(r"(THE END|FINIS)\.?", re.IGNORECASE)
_ABBREVIATION = re.compile(r"\b(Mr|Mrs|Dr|St|Esq|Messrs|Col|Capt)\.$")


@dataclass(frozen=True, kw_only=True)
class Prose:
    """One side of the split: the running text of its chapters, its paragraphs and its sentences."""

    chapters: tuple[str, ...]
    paragraphs: tuple[str, ...]
    sentences: tuple[str, ...]


def load_prose(path: Path) -> tuple[Prose, Prose]:
    """The training side and the held-out side of the text in `path`, a file or a folder of them.

    Whole chapters are held out. A held-out sentence or paragraph that the training side happens
    to contain too ("Oh! yes.") is left out of the lists the held-out examples are drawn from.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    chapters = [
        (f"chapter {file.stem} {number}", chapter)
        for file in files
        for number, chapter in enumerate(file.read_text(encoding="utf-8").split(CHAPTER_MARK))
    ]
    return split_chapters(chapters)


def split_chapters(chapters: list[tuple[str, str]]) -> tuple[Prose, Prose]:
    """The two sides of (name, text) chapters; the name alone decides the side."""
    kept = [text for name, text in chapters if not is_held_out(name, one_in=HELD_OUT_CHAPTERS)]
    held = [text for name, text in chapters if is_held_out(name, one_in=HELD_OUT_CHAPTERS)]
    return _prose(kept, seen=""), _prose(held, seen="\n".join(kept))


def _prose(chapters: list[str], *, seen: str) -> Prose:
    paragraphs = [text for chapter in chapters for text in chapter.split("\n\n")]
    sentences = [text for paragraph in paragraphs for text in split_sentences(paragraph)]
    return Prose(
        chapters=tuple(chapters),
        paragraphs=tuple(text for text in paragraphs if text not in seen or not seen),
        sentences=tuple(text for text in sentences if text not in seen or not seen),
    )


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, in order; "Mr. Knightley" is not an end."""
    sentences: list[str] = []
    for piece in re.split(r'(?<=[.!?])\s+(?=[A-Z"])', paragraph):
        if sentences and _ABBREVIATION.search(sentences[-1]):
            sentences[-1] += " " + piece
        else:
            sentences.append(piece)
    return sentences


def novels_of_package(package: bytes) -> dict[str, str]:
    """The cleaned text of each novel in the Debian package, chapters joined by `CHAPTER_MARK`."""
    novels = {}
    for lines in _string_vectors(_database_of_package(package)):
        title = next(line for line in lines if line)
        novels[re.sub(r"\W+", "_", title.lower())] = CHAPTER_MARK.join(_chapters(lines))
    return novels


def _chapters(lines: list[str]) -> list[str]:
    """The chapters' text, without title page, headings and what follows the end."""
    chapters: list[list[str]] = []
    for line in lines:
        if _HEADING.fullmatch(line.strip()):
            chapters.append([])
        elif _END.fullmatch(line.strip()) or line.startswith("A NOTE ON THE TEXT"):
            break
        elif chapters:
            chapters[-1].append(line)
    return [_unwrap(chapter) for chapter in chapters if any(chapter)]


def _unwrap(lines: list[str]) -> str:
    """Paragraphs on one line each, a blank line between, without typographic leftovers."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    joined = (re.sub(r"\s+", " ", text.replace("_", "")).strip() for text in paragraphs)
    return "\n\n".join(text for text in joined if text and not text.startswith("*"))


def _database_of_package(package: bytes) -> bytes:
    """R's lazy-load database out of a .deb, which is an `ar` archive holding `data.tar.xz`."""
    position = len(b"!<arch>\n")
    while position < len(package):
        name = package[position : position + 16].decode().strip(" /")
        size = int(package[position + 48 : position + 58])
        position += 60
        if name.startswith("data.tar"):
            data = io.BytesIO(package[position : position + size])
            with tarfile.open(fileobj=data) as archive:
                member = next(item for item in archive if item.name.endswith(_DATABASE))
                file = archive.extractfile(member)
                assert file is not None, f"{_DATABASE} is a regular file in the package"
                return file.read()
        position += size + size % 2
    raise ValueError("The package holds no data.tar: expected Debian's r-cran-janeaustenr .deb.")


def _string_vectors(database: bytes) -> list[list[str]]:
    """The objects of a lazy-load database: each 4 bytes of length, then a zlib stream."""
    vectors = []
    while database:
        stream = zlib.decompressobj()
        vectors.append(_string_vector(stream.decompress(database[4:])))
        database = stream.unused_data
    return vectors


def _string_vector(serialized: bytes) -> list[str]:
    """A character vector in R's serialization (R Internals, section "Serialization Formats")."""
    (encoding_size,) = struct.unpack_from(">I", serialized, 14)
    position = 18 + encoding_size
    kind, count = struct.unpack_from(">II", serialized, position)
    if kind & 0xFF != 16:
        raise ValueError(f"An object has R type {kind & 0xFF}: expected 16, a character vector.")
    position += 8
    strings = []
    for _ in range(count):
        (size,) = struct.unpack_from(">i", serialized, position + 4)
        position += 8
        strings.append(serialized[position : position + size].decode("utf-8"))
        position += size
    return strings


def main() -> None:
    """Write the novels of a package as text files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("package", type=Path, help="r-cran-janeaustenr_*.deb")
    parser.add_argument("folder", type=Path, help="where the .txt files go")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, text in novels_of_package(arguments.package.read_bytes()).items():
        (arguments.folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

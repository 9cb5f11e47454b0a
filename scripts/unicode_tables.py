#!/usr/bin/env python3
"""Writes src/text/unicode_tables.inc: the properties of characters that texts are cut and normalized by, so that ids do not depend on the system.

    python3 -m venv /tmp/unicode && /tmp/unicode/bin/pip install unicodedataplus==16.0.0.post1
    /tmp/unicode/bin/python scripts/unicode_tables.py [--check]

The version is that of the package, which has the Unicode Character Database as Python's unicodedata has it, and of each character the version that added
it: some parts of tokenizers have older tables. The package lacks lower case: that comes from Python itself and, for letters newer than this Python, from
their names. --check writes nothing and exits with 1 if the file is another one.
"""
import argparse
import sys
import unicodedata
from pathlib import Path

import unicodedataplus as ucd

TABLES = Path(__file__).resolve().parents[1] / "src/text/unicode_tables.inc"
POINTS = range(0x110000)
# Categories in the order of kCategoryNames (src/text/characters.cpp).
CATEGORIES = ["Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl",
              "Zp", "Cc", "Cf", "Cs", "Co", "Cn"]
COMPATIBLE, COMPOSES = 1 << 5, 1 << 6  # beside the number of characters
HANGUL = range(0xAC00, 0xD7A4)  # computed, not in a table
# The versions of the tables in tokenizers 0.23.3: its normal forms are those of the crate unicode-normalization-alignments, and Punctuation asks
# unicode_categories, in which U+166D and U+111C9 are punctuation still.
NORMAL_FORMS, PUNCTUATION = (9, 0), (8, 0)
ONCE_PUNCTUATION = "\u166d\U000111c9"

HEADER = """\
// Made by scripts/unicode_tables.py; not edited by hand. The data are those of the Unicode Character Database, Copyright (c) 1991-2024 Unicode, Inc.,
// under the Unicode License V3, which cmake/copyright has.
#pragma once

#include <cstdint>

namespace mantissa {{

inline constexpr const char* kUnicodeVersion = "{version}";
"""


def runs(value_of):
    """first code point << 8 | value, where another value begins."""
    out, last = [], None
    for point in POINTS:
        if (value := value_of(chr(point))) != last:
            out.append(point << 8 | value)
            last = value
    return out


def is_of(version, character):
    return ucd.category(character) != "Cn" and tuple(map(int, ucd.age(character).split("."))) <= version


def combining(character):
    return ucd.combining(character) if is_of(NORMAL_FORMS, character) else 0


def is_punctuation(character):
    return character in ONCE_PUNCTUATION or (ucd.category(character)[0] == "P" and is_of(PUNCTUATION, character))


def decompositions():
    """code point << 8 | flags | number of characters, and these; one step, as the database has it."""
    out = []
    for point in POINTS:
        fields = ucd.decomposition(chr(point)).split()
        if not fields or point in HANGUL or not is_of(NORMAL_FORMS, chr(point)):
            continue
        compatible = fields[0].startswith("<")
        characters = [int(field, 16) for field in fields[compatible:]]
        composes = not compatible and len(characters) == 2 and ucd.normalize("NFC", chr(point)) == chr(point)
        out += [point << 8 | COMPATIBLE * compatible | COMPOSES * composes | len(characters), *characters]
    return out


def lower(character):
    """The simple mapping. For U+0130 it is "i", without the dot that the full one has behind it."""
    if unicodedata.category(character) != "Cn":
        return character.lower()[0]
    name = ucd.name(character, "")
    return ucd.lookup(name.replace("CAPITAL", "SMALL")) if ucd.category(character) == "Lu" and "CAPITAL" in name else character


def lower_case():
    """Capitals and their small letters, in pairs."""
    out = []
    for point in POINTS:
        if ucd.category(chr(point)) != "Cn" and (small := lower(chr(point))) != chr(point):
            out += [point, ord(small)]
    return out


def table(name, values):
    lines, line = [], ""
    for value in values:
        entry = f"{value:#x},"
        if len(line) + len(entry) > 158:
            lines, line = [*lines, line], ""
        line += entry
    return f"inline constexpr uint32_t {name}[] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = HEADER.format(version=ucd.unidata_version)
    text += table("kCategoryRuns", runs(lambda character: CATEGORIES.index(ucd.category(character))))
    text += table("kCombiningRuns", runs(combining))
    text += table("kPunctuationRuns", runs(is_punctuation))
    text += table("kDecompositions", decompositions())
    text += table("kLowerCase", lower_case()) + "\n}  // namespace mantissa\n"
    if arguments.check:
        sys.exit(0 if TABLES.exists() and TABLES.read_text() == text else f"{TABLES} is not what Unicode {ucd.unidata_version} of unicodedataplus gives")
    TABLES.write_text(text)


if __name__ == "__main__":
    main()

"""The words, names, numbers and strings the generated dialogues are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


def listed(text: str) -> tuple[str, ...]:
    """The words of a text: a list of many words is easier to read without quotes."""
    return tuple(text.split())


FIRST_NAMES = listed("""
    Anna Tom Emma George Mary Henry Jane Edward Lucy Frank Alice James Clara Peter Nora Hugo Ida Max
    Eva Leo Ruth Paul Vera Carl Rosa Adam Lena Felix Maya Omar Sara Ivan Nina Oscar Julia Simon Ella
    Victor Laura Daniel Zoe Renée José Zoë Jürgen Søren Chloé Łukasz Björn Inés Noël Françoise
""")
COLOURS = listed("red blue green black white yellow brown grey pink purple golden silver")
THINGS = listed("""
    hat cup book key lamp coat box pen ring bag clock ball chair shoe letter map bottle basket coin
    flower knife spoon candle mirror drum flag kite bell brush ribbon
""")
GOODS = listed("""
    apples books letters coins pears eggs cups stones cards shells nuts plums stamps ropes
""")
PLACES = listed("""
    garden kitchen drawer library attic cellar hall stable church market school barn boat tower
    bedroom pocket cupboard parlour
""")
CITIES = (
    *listed("""
        Paris London Rome York Bath Berlin Madrid Vienna Dublin Oslo Lisbon Athens Prague Cairo Lima
        Tokyo Boston Chicago Denver Seattle Zürich Malmö Kraków Bogotá Montréal Düsseldorf Tromsø
        Lyon Milan Naples Geneva Warsaw Sydney Delhi Seoul
    """),
    *("San Francisco", "New York", "São Paulo", "Los Angeles", "Hong Kong"),
)
TRADES = listed("""
    baker teacher doctor farmer sailor tailor painter lawyer miller gardener captain clerk nurse
    carpenter singer printer
""")
WORDS = listed("""
    tea rain bread house river music winter summer paper stone water light bird tree road glass
    silver morning evening honey apple window door table horse sheep wolf fox star moon sun sea
    wind snow fire gold salt milk fish corn wool leaf seed hill lake wood iron rose
""")

_ONSETS = listed("b c d f g h j k l m n p r s t v w z br cr dr fr gr kr pl st tr th sh ch")
_VOWELS = listed("a e i o u a e i o u a e i o ai ea ou é ö ü å")
_CODAS = ("", "", "", "", "n", "n", "r", "r", "l", "s", "t", "m", "nd", "rk", "lt", "ñ", "š", "ł")
_CODE_ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"

# First and last code point of the scripts the byte-level tokens are practised on.
_SCRIPTS = (
    (0x3041, 0x3093),  # hiragana
    (0x30A1, 0x30F3),  # katakana
    (0x4E00, 0x9F00),  # Chinese characters
    (0xAC00, 0xD7A0),  # hangul
    (0x0430, 0x044F),  # Cyrillic
    (0x03B1, 0x03C9),  # Greek
    (0x05D0, 0x05EA),  # Hebrew
    (0x0627, 0x063A),  # Arabic
    (0x1F600, 0x1F64F),  # faces
    (0x1F400, 0x1F43E),  # animals
    (0x1F330, 0x1F37F),  # food and plants
)


def invented_word(rng: Random) -> str:
    """Two or three syllables in lower case, some with accents: "tramélsou"."""
    syllables = (
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.randint(2, 3))
    )
    return "".join(syllables)


def invented_name(rng: Random) -> str:
    """One or two invented words with capitals: "Gounal Thémis"."""
    return " ".join(invented_word(rng).capitalize() for _ in range(rng.randint(1, 2)))


def person(rng: Random) -> str:
    """A first name: mostly a known one, sometimes an invented one."""
    return rng.choice(FIRST_NAMES) if rng.random() < 0.6 else invented_word(rng).capitalize()


def people(rng: Random, count: int) -> list[str]:
    """`count` different first names."""
    names: list[str] = []
    while len(names) < count:
        name = person(rng)
        if name not in names:
            names.append(name)
    return names


def code(rng: Random) -> str:
    """Capitals and digits in groups: "K7Q-2ZB"."""
    groups = (
        "".join(rng.choices(_CODE_ALPHABET, k=rng.randint(2, 4))) for _ in range(rng.randint(1, 3))
    )
    return "-".join(groups)


def unicode_string(rng: Random) -> str:
    """One to three short words in scripts that the tokenizer must spell in bytes."""
    words = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        first, last = rng.choice(_SCRIPTS)
        words.append("".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 5))))
    return " ".join(words)


def unicode_name(rng: Random) -> str:
    """A name in one script, or in two as Japanese firms have: three to nine characters."""
    (first, last), *others = rng.sample(_SCRIPTS, 1 if rng.random() < 0.6 else 2)
    name = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(3, 5)))
    for first, last in others:
        name += "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(2, 4)))
    return name


def some_words(rng: Random, low: int, high: int) -> str:
    """`low` to `high` everyday words: "blue rain window"."""
    pool = (*COLOURS, *WORDS, *THINGS)
    return " ".join(rng.choice(pool) for _ in range(rng.randint(low, high)))


def value_string(rng: Random) -> str:
    """What a string argument of a tool may be: names, places, words, codes, other scripts."""
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(CITIES)
    if kind < 0.45:
        return person(rng)
    if kind < 0.6:
        return invented_name(rng)
    if kind < 0.8:
        return some_words(rng, 1, 3)
    return code(rng) if kind < 0.9 else unicode_string(rng)

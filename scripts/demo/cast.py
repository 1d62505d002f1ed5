"""Who a story can be about, whom they meet and where: the word lists of the story grammar."""

from dataclasses import dataclass
from itertools import permutations
from random import Random

SHE_NAMES = (
    "Mia", "Lily", "Anna", "Rosa", "Nora", "Ella", "Zoe", "Ida", "Clara", "Maya", "Ruth", "Emma", "Lucy", "Sara",
    "Tilda", "Hazel", "Daisy", "Willow", "Poppy", "Luna", "Pearl", "Ivy", "Alma", "Greta", "Kiki", "Molly", "Nina", "Olive",
)  # fmt: skip
HE_NAMES = (
    "Tom", "Ben", "Max", "Leo", "Sam", "Jack", "Finn", "Noah", "Oscar", "Hugo", "Omar", "Theo", "Paul", "Emil",
    "Nico", "Pip", "Bruno", "Rusty", "Otto", "Milo", "Bramble", "Felix", "Barney", "Toby", "Gus", "Ravi", "Kai", "Arlo",
)  # fmt: skip
ANIMALS = (
    "fox", "bear", "rabbit", "mouse", "cat", "dog", "hedgehog", "squirrel", "badger", "otter", "goat", "lamb", "pony",
    "beaver", "mole", "frog", "donkey", "wolf", "deer", "dragon", "turtle", "elephant", "monkey", "lion", "tiger",
    "panda", "penguin", "pig", "hamster", "puppy", "kitten", "horse", "giraffe", "koala", "unicorn", "robot", "giant", "troll",
)  # fmt: skip
SHE_PEOPLE = ("girl", "princess", "shepherd girl", "girl with red shoes", "farm girl", "weaver", "witch", "queen")
HE_PEOPLE = ("boy", "prince", "shepherd boy", "boy with a green hat", "farm boy", "knight", "wizard", "king")
ADJECTIVES = (
    "little", "young", "small", "brave", "shy", "cheerful", "curious", "clever", "gentle", "quiet", "kind", "merry",
    "playful", "friendly", "tiny", "happy",
)  # fmt: skip
HOMES = (
    "in a small village by the sea", "at the edge of a dark forest", "in a little house on a hill",
    "beside a slow green river", "in a warm valley between two mountains", "near an old stone bridge",
    "in a cottage under a tall oak tree", "in a busy town with a tall clock tower", "on a farm at the end of a long road",
    "in a quiet wood", "beside a deep blue lake", "in a castle with seven towers", "on an island full of flowers",
    "next to a noisy mill", "at the foot of a snowy mountain", "in a land far away", "in a sunny garden behind a high wall",
    "near a little harbor", "in a hollow under the roots of a beech tree", "in a green meadow",
)  # fmt: skip
HELPERS = (
    "old owl", "wise old turtle", "small brown mouse", "friendly crow", "tall heron", "patient donkey", "white goose",
    "gray cat", "gentle deer", "big brown bear", "quick little swallow", "young otter", "clever magpie", "spotted frog",
    "old fisherman", "kind gardener", "tired postman", "young shepherd", "old clockmaker", "kind baker", "tall sailor",
    "traveling musician", "miller with a sack of flour", "woman with a basket of apples", "strong blacksmith",
    "cheerful farmer", "old woman with a walking stick", "friendly hedgehog", "busy beaver", "silver wolf",
)  # fmt: skip
SPOTS = (
    "near the fountain", "behind the barn", "in the tall grass", "by the old well", "under the bridge", "on the river bank",
    "in the market square", "behind the big rocks", "in a hollow log", "between the roots of the oak tree",
    "on the garden wall", "next to the pond", "in the hay", "under a pile of leaves", "behind the church",
    "beside the mill", "in the apple orchard", "among the blackberry bushes", "under a wooden bench", "in the old boathouse",
)  # fmt: skip
TREATS = (
    "honey cakes", "warm apple pie", "fresh bread with jam", "blueberry muffins", "hot vegetable soup",
    "sweet pears", "nut cookies", "pancakes", "hot chocolate", "strawberries with cream",
)  # fmt: skip
HOBBIES = (
    "to sing in the morning", "to collect round stones", "to watch the clouds", "to climb hills", "to tell jokes",
    "to count the stars", "to paint with berries", "to listen to old stories", "to splash in puddles",
    "to look at the boats", "to dance in the rain", "to explore new paths", "to plant seeds", "to make other people laugh",
)  # fmt: skip
_SYLLABLES = ("ba", "da", "fi", "ga", "lo", "mi", "nu", "lu", "ra", "so", "ti", "vu", "za", "ki", "ho", "ju")
_ENDINGS = ("", "n", "l", "r", "x", "bert", "lina", "ma", "sh")


@dataclass(frozen=True)
class Hero:
    """The one a story follows: a name, what they are ("little fox"), and whether they are a she."""

    name: str
    kind: str
    adjective: str
    is_she: bool

    @property
    def pronouns(self) -> tuple[str, str, str]:
        """Subject, object and possessive."""
        return ("she", "her", "her") if self.is_she else ("he", "him", "his")


def with_article(noun: str) -> str:
    """A noun phrase with "a" or "an" before it, as it sounds."""
    vowel = noun[0].lower() in "aeiou" and not noun.startswith(("unicorn", "use"))
    return f"{'an' if vowel else 'a'} {noun}"


def draw_name(rng: Random, is_she: bool) -> str:
    """A name, now and then one made up on the spot so that names unheard of can be told about too."""
    if rng.random() < 0.15:
        syllables = "".join(rng.sample(_SYLLABLES, rng.choice((1, 2, 2))))
        return (syllables + rng.choice(_ENDINGS if len(syllables) > 2 else _ENDINGS[1:])).capitalize()
    return rng.choice(SHE_NAMES if is_she else HE_NAMES)


def all_names() -> set[str]:
    """Every name that ``draw_name`` may draw."""
    stems = {*_SYLLABLES, *map("".join, permutations(_SYLLABLES, 2))}
    made_up = {stem + ending for stem in stems for ending in _ENDINGS if ending or len(stem) > 2}
    return {*SHE_NAMES, *HE_NAMES, *(name.capitalize() for name in made_up)}


def draw_hero(rng: Random) -> Hero:
    """Somebody to tell of: half of them animals, half people."""
    is_she = rng.random() < 0.5
    people = SHE_PEOPLE if is_she else HE_PEOPLE
    kind = rng.choice(ANIMALS) if rng.random() < 0.6 else people[0] if rng.random() < 0.5 else rng.choice(people)
    return Hero(draw_name(rng, is_she), kind, rng.choice(ADJECTIVES), is_she)

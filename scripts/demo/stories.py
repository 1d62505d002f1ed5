"""Short stories in plain English: a hero, a home, a problem, an attempt or two, a helper and an ending."""

from random import Random

from scripts.demo.cast import HELPERS, HOBBIES, HOMES, SPOTS, TREATS, Hero, draw_hero, draw_name, with_article
from scripts.demo.grammar import Plot, read_plot

PLOT_NAMES = (
    "lost", "stuck", "afraid", "make", "foundling", "journey", "quarrel", "village", "lonely", "wayhome", "contest",
)  # fmt: skip
MIN_WORDS, MAX_WORDS = 60, 130
_NOOKS = (
    "behind the hedge", "behind a big stone", "under the stairs", "behind the barn", "inside a hollow tree",
    "the other side of the wall", "under the bridge", "behind the rose bush",
)  # fmt: skip


def tell_story(rng: Random, hero: Hero | None = None) -> str:
    """A story of MIN_WORDS to MAX_WORDS words, about ``hero`` or somebody drawn; the same for the same rng."""
    plot = read_plot(rng.choice(PLOT_NAMES))
    while True:
        story = _tell_once(rng, plot, hero or draw_hero(rng))
        if MIN_WORDS <= len(story.split()) <= MAX_WORDS:
            return story


def _tell_once(rng: Random, plot: Plot, hero: Hero) -> str:
    slots = _hero_slots(hero, rng) | _world_slots(hero, rng) | plot.draw_slots(rng)
    if "thing" in slots:
        slots["a_thing"] = with_article(slots["thing"])
    return " ".join(part.tell(rng, slots) for part in (read_plot("opening"), plot, read_plot("ending")))


def _hero_slots(hero: Hero, rng: Random) -> dict[str, str]:
    he, him, his = hero.pronouns
    kind = f"{hero.adjective} {hero.kind}" if rng.random() < 0.8 else hero.kind
    himself = "herself" if hero.is_she else "himself"
    return {
        "hero": hero.name,
        "kind": kind,
        "a_kind": with_article(kind),
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
    }


def _world_slots(hero: Hero, rng: Random) -> dict[str, str]:
    helper = rng.choice([helper for helper in HELPERS if _short(helper) not in hero.kind.split()])
    spots = dict(zip(("spot1", "spot2", "spot3"), rng.sample(SPOTS, 3), strict=True))
    return spots | {
        "helper": f"the {_short(helper)}",
        "a_helper": with_article(helper),
        "friend": next(name for name in iter(lambda: draw_name(rng, rng.random() < 0.5), None) if name != hero.name),
        "home": rng.choice(HOMES),
        "hobby": rng.choice(HOBBIES),
        "treat": rng.choice(TREATS),
        "nook": rng.choice(_NOOKS),
    }


def _short(helper: str) -> str:
    """The noun alone: "old woman with a stick" is a woman."""
    return helper.split(" with ")[0].split()[-1]

"""Little sums in words and figures, each with its answer."""

from dataclasses import dataclass
from random import Random

from scripts.demo.cast import draw_name

_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_PLAIN = ("What is {e}?", "What is {e}?", "What's {e}?", "How much is {e}?", "{e} = ?", "{e}?", "{e}", "{e} =", "Calculate {e}.",
          "What does {e} make?", "Please tell me what {e} is.", "Do you know what {e} is?", "Can you tell me: what is {e}?")  # fmt: skip
_ASKED = {
    "+": (
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Can you add {a} and {b}?",
        "What do you get if you add {a} and {b}?",
    ),
    "-": (
        "Take {b} from {a}.",
        "What is {a} take away {b}?",
        "Subtract {b} from {a}.",
        "What is left if you take {b} from {a}?",
    ),
    "*": ("Multiply {a} by {b}.", "What is the product of {a} and {b}?", "Can you multiply {a} by {b}?"),
}
_GOING_ON = {
    "+": ("And {b} more?", "Now add {b}.", "Plus {b}?", "And plus {b}?", "Add {b} to that."),
    "-": ("And {b} less?", "Now take away {b}.", "Minus {b}?", "And minus {b}?", "Take {b} from that."),
}
_SIGNS = {"+": ("+", "+", "+", "plus"), "-": ("-", "-", "-", "minus"), "*": ("*", "x", "times", "times")}
_THINGS = ("apples", "nuts", "coins", "eggs", "books", "stones", "cookies", "pears", "balls", "flowers")


@dataclass(frozen=True)
class Sum:
    """``a operator b``, the operator being +, - or *."""

    a: int
    operator: str
    b: int

    @property
    def result(self) -> int:
        """What it comes to."""
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operator]

    @property
    def answer(self) -> str:
        """The assistant's sentence."""
        return f"{self.a} {'times' if self.operator == '*' else self.operator} {self.b} is {self.result}."

    def question(self, rng: Random) -> str:
        """One of the ways to ask for it."""
        if rng.random() < 0.25:
            return rng.choice(_ASKED[self.operator]).format(a=self.a, b=self.b)
        sign = rng.choice(_SIGNS[self.operator])
        in_words = max(self.a, self.b) <= 20 and rng.random() < 0.06
        a, b = (_WORDS[self.a], _WORDS[self.b]) if in_words else (self.a, self.b)
        sign = {"+": "plus", "-": "minus", "*": "times"}[self.operator] if in_words else sign
        tight = sign in "+-*" and rng.random() < 0.15
        return rng.choice(_PLAIN).format(e=f"{a}{sign}{b}" if tight else f"{a} {sign} {b}")

    def follow_up(self, rng: Random) -> str:
        """One of the ways to ask for it when ``a`` has just been said."""
        return rng.choice(_GOING_ON[self.operator]).format(b=self.b)


def draw_sum(rng: Random) -> Sum:
    """Mostly + and - up to 20, some up to 99, and the multiplication table up to 10."""
    operator = rng.choices("+-*", weights=(46, 40, 14))[0]
    if operator == "*":
        return Sum(rng.randint(0, 10), operator, rng.randint(0, 10))
    top = 99 if rng.random() < 0.3 else 20
    a, b = rng.randint(0, top), rng.randint(0, top)
    if operator == "-" and a < b and rng.random() < 0.5:
        a, b = b, a
    return Sum(a, operator, b)


def word_problem(rng: Random) -> tuple[str, str]:
    """A sum as a very short story, and its answer."""
    name, things = draw_name(rng, rng.random() < 0.5), rng.choice(_THINGS)
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    if rng.random() < 0.5:
        verb = rng.choice(("finds", "buys", "gets"))
        return (
            f"{name} has {a} {things} and {verb} {b} more. How many {things} does {name} have now?",
            f"{name} has {a + b} {things}.",
        )
    a, b = max(a, b) + 2, min(a, b)
    verb = rng.choice(("loses", "gives away", "sells"))
    return (
        f"{name} has {a} {things} and {verb} {b}. How many {things} does {name} have left?",
        f"{name} has {a - b} {things} left.",
    )

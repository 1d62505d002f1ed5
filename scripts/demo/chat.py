"""Little conversations: sums above all, and enough small talk to be polite between them."""

from collections.abc import Callable
from random import Random

from scripts.demo.cast import draw_hero, draw_name, with_article
from scripts.demo.stories import tell_story
from scripts.demo.sums import Sum, draw_sum, word_problem

Message = dict[str, str]
Exchange = tuple[str, str]
"""What the user says and what the assistant answers."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a friendly assistant who tells stories and does little sums.",
    "You are a small language model.", "Answer in one short sentence.", "Be kind and brief.",
    "You help children with their homework.", "You are a helpful, honest assistant. Answer the question of the user.",
)  # fmt: skip
_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hello there!"), "Hello! Shall we do a sum, or would you like a story?"),
    (("Good morning", "Good morning!", "Good evening!", "Good afternoon!", "Good day"), "Good day to you! What can I do for you?"),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"), "I am very well, thank you. How are you?"),
    (("I am fine.", "I am fine, thanks.", "Very well, thank you.", "Good!"), "I am glad to hear that."),
    (("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?", "Are you a robot?"),
     "I am the small language model that comes with oDriver. I tell stories and do little sums."),
    (("What can you do?", "How can you help me?", "Help", "Can you help me?", "What do you know?"),
     "I can tell you a story, or do a little sum. Try: What is 3 + 4?"),
    (("Thank you", "Thank you!", "Thanks", "Thanks!", "Thank you very much."), "You are welcome!"),
    (("Goodbye", "Goodbye!", "Bye", "Bye!", "See you later!", "Good night!"), "Goodbye! Come back soon."),
    (("Yes", "Yes, please.", "OK", "Okay", "Sure", "No", "No, thank you."), "Just tell me: a story, or a little sum?"),
    (("Are you smart?", "Are you clever?", "Are you very big?"), "I am very small, but I do my best."),
    (("Very good!", "Well done!", "That is right.", "Great!", "Nice!", "I like that."), "Thank you, that makes me happy."),
    (("That is wrong.", "No, that is not right.", "Are you sure?"), "I am only a small model, and I can be wrong."),
)  # fmt: skip
_OUT_OF_REACH = "I am too small to know that. I can tell you a story or do a little sum."
_BIG_QUESTIONS = (
    "What is the capital of {topic}?", "Who was the first king of {topic}?", "How do I cook {topic}?", "What is {topic}?",
    "Write a poem about {topic}.", "Who invented {topic}?", "How does {topic} work?", "Explain {topic}.", "Where is {topic}?",
    "Translate {topic} into French.", "Why is {topic} so important?", "When was {topic} built?", "Can you explain {topic} to me?",
    "Write a Python program for {topic}.", "Give me a recipe with {topic}.", "Who wrote {topic}?", "Tell me about {topic}.",
    "What do you think about {topic}?", "How many people know {topic}?", "How many legs does {topic} have?", "How old is {topic}?",
    "How big is {topic}?", "Why do people like {topic}?", "Is {topic} good for me?", "Do you like {topic}?", "Who is {topic}?",
    "Which is better, {topic} or {other}?", "Sing a song about {topic}.", "What color is {topic}?", "Why is {topic} blue?",
    "Write an email about {topic}.", "What is the difference between {topic} and {other}?", "{topic}",
    "What is the meaning of {topic}?", "What is the best {topic}?",
)  # fmt: skip
_TOPICS = (
    "France", "England", "China", "Brazil", "Rome", "the moon", "the sun", "rice", "pasta", "electricity", "the weather",
    "music", "football", "life", "love", "the computer", "the telephone", "history", "quantum physics", "a black hole",
    "the internet", "JAX", "a TPU", "gravity", "the ocean", "the president", "money", "Hamlet", "Germany", "India",
    "a dog", "the cat", "a bear", "the sky", "the sea", "school", "my friend", "a car", "the world", "time", "Paris", "coffee",
)  # fmt: skip
_OTHER_SUMS = (
    "What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.", "What is the square root of {a}?",
    "What is {a} + {b} + {c}?", "What is {a} plus {b} minus {c}?", "{a} * {b} + {c}", "What is {a} - {b} - {c}?",
)  # fmt: skip
_NOT_THAT_SUM = "I can only add, take away or multiply two numbers."
_STORY_REQUESTS = (
    "Tell me a story{about}.", "Please tell me a story{about}.", "Tell me a short story{about}", "Can you tell me a story{about}?",
    "I want to hear a story{about}.", "A story{about}, please.", "Tell a story{about}", "Write a story{about}.",
    "Write a short story{about}.", "Tell me another story{about}.", "Could you tell me a little story{about}?", "story{about}",
)  # fmt: skip


def draw_conversation(rng: Random, exchanges: int, story_share: float = 0.06) -> list[Message]:
    """A conversation of at least so many exchanges, as chat messages; now and then a system prompt opens it."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.12 else []
    told = 0
    while told < exchanges:
        for user, assistant in _draw_topic(rng, story_share):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
            told += 1
    return messages


def ask_for_story(rng: Random) -> Exchange:
    """A story asked for, mostly about somebody: the story is about just that one."""
    hero = draw_hero(rng)
    wish = rng.random()
    if wish < 0.3:
        about = ""
    elif wish < 0.5:
        about = f" about {with_article(hero.kind)}"
    elif wish < 0.7:
        about = f" about {with_article(f'{hero.adjective} {hero.kind}')}"
    else:
        about = f" about {with_article(hero.kind)} {rng.choice(('named', 'called'))} {hero.name}"
    return _careless(rng.choice(_STORY_REQUESTS).format(about=about), rng), tell_story(rng, hero)


def _draw_topic(rng: Random, story_share: float) -> list[Exchange]:
    """One exchange or a few that belong together."""
    if rng.random() < story_share:
        return [ask_for_story(rng)]
    topics: tuple[Callable[[Random], list[Exchange]], ...] = (
        _sums,
        _problem,
        _small_talk,
        _names,
        _big_question,
        _numbers,
        _other_sum,
    )
    return rng.choices(topics, weights=(72, 6, 9, 3, 5, 3, 2))[0](rng)


def _sums(rng: Random) -> list[Exchange]:
    """A sum, and sometimes another that goes on from its result."""
    first = draw_sum(rng)
    exchanges = [(_careless(first.question(rng), rng), first.answer)]
    if first.operator != "*" and 0 <= first.result <= 40 and rng.random() < 0.15:
        more = Sum(first.result, rng.choice("+-"), rng.randint(0, min(10, first.result)))
        exchanges.append((_careless(more.follow_up(rng), rng), more.answer))
    return exchanges


def _problem(rng: Random) -> list[Exchange]:
    return [word_problem(rng)]


def _small_talk(rng: Random) -> list[Exchange]:
    said, answer = rng.choice(_SMALL_TALK)
    return [(_careless(rng.choice(said), rng), answer)]


def _names(rng: Random) -> list[Exchange]:
    """Somebody says who they are, and it is remembered."""
    name = draw_name(rng, rng.random() < 0.5)
    said = rng.choice(
        ("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}!", "You can call me {}.")
    ).format(name)
    asked = rng.choice(("What is my name?", "Do you know my name?", "Who am I?"))
    return [
        (said, f"Nice to meet you, {name}!"),
        *(_small_talk(rng) if rng.random() < 0.5 else []),
        (asked, f"Your name is {name}."),
    ]


def _big_question(rng: Random) -> list[Exchange]:
    topic, other = rng.sample(_TOPICS, 2)
    return [(_careless(rng.choice(_BIG_QUESTIONS).format(topic=topic, other=other), rng), _OUT_OF_REACH)]


def _other_sum(rng: Random) -> list[Exchange]:
    a, b, c = (rng.randint(1, 20) for _ in range(3))
    return [(_careless(rng.choice(_OTHER_SUMS).format(a=a, b=b, c=c), rng), _NOT_THAT_SUM)]


def _numbers(rng: Random) -> list[Exchange]:
    """Which of two numbers is bigger, and what comes next."""
    small, big = sorted(rng.sample(range(51), 2))
    if rng.random() < 0.5:
        return [(_careless(f"What number comes after {small}?", rng), f"After {small} comes {small + 1}.")]
    first, second = rng.sample((small, big), 2)
    return [(_careless(f"Which number is bigger, {first} or {second}?", rng), f"{big} is bigger than {small}.")]


def _careless(text: str, rng: Random) -> str:
    """``text`` as people type it: now and then without capitals or without its last mark."""
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.!") if rng.random() < 0.12 else text

"""Prompts to train drafters on, made of what every Python carries: its library's sources and its manual
(pydoc_data.topics), and questions about everyday subjects. No download.

A passage or subject is either trained on or held out, by its hash, so that held-out prompts quote nothing
that was seen. Prompts that drafters are measured with elsewhere (human-eval, MT-bench) are not among them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

HELD_OUT_SHARE = 10  # one in so many

CODE_TASKS = (
    "Explain step by step what this Python function does.\n\n{}",
    "Add a docstring to this function and show the whole function again.\n\n{}",
    "Add type hints to this function. Answer with the complete code.\n\n{}",
    "Rewrite this function so that it is easier to read, and return all of it.\n\n{}",
    "Rename the variables of this function to longer names. Show the result.\n\n{}",
    "Write three unit tests for this function.\n\n{}",
    "Is there a bug in this code? Show the corrected code.\n\n{}",
    "Add a comment above every line of this code.\n\n{}",
    "Add logging to this function and print it in full.\n\n{}",
)
PROSE_TASKS = (
    "Summarise the following text in two sentences.\n\n{}",
    "Summarise this text as a list of short points.\n\n{}",
    "Rewrite this text in simpler words.\n\n{}",
    "Extract the most important sentences of this text, word for word.\n\n{}",
    "List every technical term in the following text.\n\n{}",
    "Write three questions about this text and answer them from the text.\n\n{}",
    "Correct the grammar of this text and repeat it.\n\n{}",
    "What is this text about? Quote the sentence that says so.\n\n{}",
)
QUESTIONS = (
    "What is {}?", "Explain {} to a child.", "Give me five facts about {}.", "Write a short story about {}.",
    "Write a poem about {}.", "Why does {} matter?", "How does {} work?", "What are the pros and cons of {}?",
    "Write a short essay on {}.", "Give me a step by step guide to {}.", "Write an email about {}.",
    "Describe the history of {}.", "What would change without {}?", "List ten words that go with {}.",
    "Write a dialogue between two friends about {}.", "Compare {} with something else that people know.",
    "Make a table of three kinds of {} with a column for what each is good for.",
    "What should a beginner know about {}?", "Write a product description for {}.",
    "Write a Python program that has to do with {}.",
)
SUBJECTS = (
    "photosynthesis", "gravity", "the moon", "volcanoes", "rain", "earthquakes", "the ocean", "rivers",
    "bees", "whales", "dogs", "cats", "horses", "birds", "trees", "flowers", "mushrooms", "bread",
    "cheese", "coffee", "tea", "chocolate", "soup", "salad", "pizza", "rice", "apples", "cooking",
    "baking", "gardening", "painting", "music", "the piano", "the guitar", "dancing", "theatre", "films",
    "photography", "books", "poetry", "grammar", "languages", "spelling", "handwriting", "libraries",
    "schools", "universities", "teachers", "exams", "homework", "football", "tennis", "swimming",
    "running", "cycling", "chess", "card games", "video games", "toys", "holidays", "birthdays",
    "weddings", "friendship", "family", "sleep", "dreams", "memory", "stress", "exercise", "vitamins",
    "vaccines", "the heart", "the brain", "blood", "teeth", "doctors", "hospitals", "money", "banks",
    "taxes", "inflation", "trade", "insurance", "shopping", "advertising", "startups", "job interviews",
    "teamwork", "meetings", "time management", "leadership", "elections", "laws", "courts", "police",
    "cities", "villages", "houses", "bridges", "roads", "trains", "ships", "aeroplanes", "bicycles",
    "electric cars", "batteries", "solar power", "wind power", "plastic", "recycling", "climate change",
    "forests", "deserts", "islands", "mountains", "maps", "travel", "hotels", "Paris", "Egypt", "Japan",
    "the Roman empire", "the middle ages", "the printing press", "steam engines", "electricity", "radio",
    "television", "telephones", "computers", "the internet", "email", "passwords", "databases",
    "sorting algorithms", "recursion", "linked lists", "binary search", "hash tables", "graphs",
    "prime numbers", "fractions", "percentages", "probability", "geometry", "calculus", "statistics",
    "robots", "artificial intelligence", "telescopes", "planets", "black holes", "rockets", "atoms",
    "magnets", "light", "sound", "water", "salt", "iron", "gold", "glass", "paper", "clothes", "shoes",
)


def make_prompts(count: int, *, held_out: bool, seed: int = 0) -> list[str]:
    """count prompts, all different as far as there are so many: two parts code, two parts prose, three parts
    questions."""
    draw = random.Random(f"{seed} {held_out}")
    code = [passage for passage in _functions() if _is_held_out(passage) == held_out]
    prose = [passage for passage in _paragraphs() if _is_held_out(passage) == held_out]
    subjects = [subject for subject in SUBJECTS if _is_held_out(subject) == held_out]
    kinds = ((CODE_TASKS, code, 2), (PROSE_TASKS, prose, 2), (QUESTIONS, subjects, 3))
    prompts: dict[str, None] = {}
    for _ in range(4 * count):
        if len(prompts) == count:
            break
        tasks, passages, _ = draw.choices(kinds, [weight for _, _, weight in kinds])[0]
        prompts[draw.choice(tasks).format(draw.choice(passages))] = None
    return list(prompts)


def _is_held_out(passage: str) -> bool:
    return hashlib.sha256(passage.encode()).digest()[0] % HELD_OUT_SHARE == 0


@functools.cache
def _functions() -> tuple[str, ...]:
    """Functions of the standard library's modules, 4 to 25 lines each."""
    return tuple(_short_functions())


def _short_functions() -> Iterator[str]:
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if 4 <= len(lines) <= 25:
                    yield f"```python\n{textwrap.dedent(chr(10).join(lines))}\n```"


def _paragraphs() -> Iterator[str]:
    """Pieces of the manual, two or three paragraphs and 250 to 1,200 characters each."""
    for topic in sorted(topics):
        piece = ""
        for paragraph in topics[topic].split("\n\n"):
            piece = f"{piece}\n\n{paragraph.strip()}".strip()
            if len(piece) >= 250:
                if len(piece) <= 1200:
                    yield piece
                piece = ""

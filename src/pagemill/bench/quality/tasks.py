"""What contexts are made of: four kinds, each with questions that are hard to answer from less than
the exact cache (facts: near-duplicate keys, long codes). RULER-shaped (arXiv 2404.06654), our own.

    prose      unseen text with numbers and codes hidden in it; passages to copy; its continuation;
               then two more turns, which read the first turn's answer from the cache
    needles    nothing but sentences with numbers and codes
    records    key-value lines and lines of UUIDs
    lists      lists of words to repeat; variables that are assigned to each other, amid prose
"""

from itertools import pairwise

from pagemill.bench.quality.draft import CONTINUE_PROMPT, CONTINUE_TOKENS, Ask, Draft, Kit

TASKS = ("retrieval", "needles", "kvlist", "uuid", "words", "tracking", "copy", "turns", "text")
TAIL_CHARACTERS = 12 * (CONTINUE_PROMPT + CONTINUE_TOKENS)
NUM_NEEDLES = 12
NUM_NEEDLE_QUESTIONS = 18
NUM_RECORD_QUESTIONS = 20
NUM_UUID_QUESTIONS = 8
LIST_WORDS = 12
NUM_LIST_QUESTIONS = 3
CHAIN_VARIABLES = 4
NUM_CHAINS = 3


def _needle(kit: Kit, word: str, is_code: bool) -> tuple[str, str]:
    """Beginning of a sentence, and what ends it."""
    if is_code:
        return f"The secret code of the {word} is:", f" {kit.rng.randrange(16**12):012x}"
    number = kit.rng.randrange(10**6, 10**7)
    return f"One of the special magic numbers for {word} is:", f" {number}"


def prose(kit: Kit) -> Draft:
    """Numbers and codes in text; the text goes on after the context."""
    needles = [_needle(kit, w, i % 2 == 1) for i, w in enumerate(kit.words(NUM_NEEDLES))]
    sentences = [start + end + "." for start, end in needles]
    room = kit.room - sum(kit.count(sentence + "\n\n") for sentence in sentences)
    at = kit.rng.randrange(len(kit.texts.unseen))
    paragraphs: list[str] = []
    used = 0
    while True:
        paragraph = kit.texts.unseen[(at + len(paragraphs)) % len(kit.texts.unseen)]
        used += kit.count(paragraph + "\n\n")
        if used > room:
            break
        paragraphs.append(paragraph)
    draft = Draft(joint="\n\n", lines=paragraphs, num_copies=2)
    following = range(at + len(paragraphs), at + len(paragraphs) + 40)
    rest = "\n\n".join(kit.texts.unseen[i % len(kit.texts.unseen)] for i in following)
    draft.tail = rest[:TAIL_CHARACTERS]
    _hide(kit, draft, sentences)
    for number in kit.rng.sample(range(len(needles)), len(needles)):
        start, end = needles[number]
        line = draft.lines.index(sentences[number])
        draft.asks.append(Ask("retrieval", "\n" + start, end, line))
    _talk(draft)
    return draft


def _hide(kit: Kit, draft: Draft, sentences: list[str]) -> None:
    """Insert the sentences between the lines, evenly spread, never after the last."""
    num_gaps = max(1, len(draft.lines))
    gaps = [min(num_gaps - 1, i * num_gaps // len(sentences)) for i in range(len(sentences))]
    order = kit.rng.sample(sentences, len(sentences))
    for gap, sentence in sorted(zip(gaps, order, strict=True), reverse=True):
        draft.lines.insert(gap, sentence)


def _talk(draft: Draft) -> None:
    """Two more turns: the second asks something new and the first question again, the third both
    again. Their answers stand in the context and in the turns before."""
    first, second = draft.asks[0], draft.asks[1]
    for turn, asks in ((1, (second, first)), (2, (first, second))):
        for ask in asks:
            draft.asks.append(Ask("turns", ask.prompt, ask.answer, ask.line, turn))


def needles(kit: Kit) -> Draft:
    """Sentences with numbers and codes, and nothing else."""
    draft, pairs = Draft(), []
    used = 0
    for i, word in enumerate(kit.words(len(kit.texts.words))):
        start, end = _needle(kit, word, i % 2 == 1)
        used += kit.count(f"{start}{end}.\n")
        if used > kit.room:
            break
        draft.lines.append(f"{start}{end}.")
        pairs.append((start, end))
    for line in kit.spread(len(pairs), NUM_NEEDLE_QUESTIONS):
        start, end = pairs[line]
        draft.asks.append(Ask("needles", "\n" + start, end, line))
    return draft


def records(kit: Kit) -> Draft:
    """Half key-value lines, half UUIDs."""
    draft, used, words = Draft(), 0, kit.words(len(kit.texts.words))
    pairs = []
    for word in words:
        is_uuid = used > kit.room // 2
        key = word if is_uuid else f"{word}-{kit.rng.randrange(100, 1000)}"
        value = _uuid(kit) if is_uuid else str(kit.rng.randrange(10**4, 10**5))
        used += kit.count(f"{key}: {value}\n")
        if used > kit.room:
            break
        draft.lines.append(f"{key}: {value}")
        pairs.append((key, value, is_uuid))
    for is_uuid, task, number in (
        (False, "kvlist", NUM_RECORD_QUESTIONS),
        (True, "uuid", NUM_UUID_QUESTIONS),
    ):
        lines = [i for i, pair in enumerate(pairs) if pair[2] == is_uuid]
        for chosen in kit.spread(len(lines), number):
            key, value, _ = pairs[lines[chosen]]
            prompt = f"\nRepeat the record. {key}:"
            draft.asks.append(Ask(task, prompt, f" {value}", lines[chosen]))
    return draft


def _uuid(kit: Kit) -> str:
    digits = f"{kit.rng.randrange(16**32):032x}"
    cuts = (0, 8, 12, 16, 20, 32)
    return "-".join(digits[a:b] for a, b in pairwise(cuts))


def lists(kit: Kit) -> Draft:
    """Lists of words, then chains of variables hidden in prose."""
    draft, used = Draft(), 0
    names = iter(kit.words(len(kit.texts.words)))
    rows = []
    while used <= kit.room // 2:
        name, row = next(names), " ".join(kit.words(LIST_WORDS))
        used += kit.count(f"List {name}: {row}\n")
        draft.lines.append(f"List {name}: {row}")
        rows.append((name, row))
    for line in kit.spread(len(rows), NUM_LIST_QUESTIONS):
        name, row = rows[line]
        draft.asks.append(Ask("words", f"\nRepeat the list. List {name}:", f" {row}", line))
    _track(kit, draft, used)
    return draft


def _track(kit: Kit, draft: Draft, used: int) -> None:
    """Chains of assignments, in order, between paragraphs of prose."""
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names = ["".join(kit.rng.sample(letters, 3)) for _ in range(NUM_CHAINS * CHAIN_VARIABLES)]
    values = [str(kit.rng.randrange(10**4, 10**5)) for _ in range(NUM_CHAINS)]
    chains = [names[i::NUM_CHAINS] for i in range(NUM_CHAINS)]
    assigned = []
    for step in range(CHAIN_VARIABLES):
        for chain, value in zip(chains, values, strict=True):
            source = value if step == 0 else f"VAR {chain[step - 1]}"
            assigned.append(f"VAR {chain[step]} = {source}")
    part = Draft(lines=_paragraphs(kit, used + sum(kit.count(line + "\n") for line in assigned)))
    gaps = [i * len(part.lines) // len(assigned) for i in range(len(assigned))]
    for i in reversed(range(len(assigned))):
        part.lines.insert(gaps[i], assigned[i])
    before = len(draft.lines)
    draft.lines += part.lines
    for chain, value in zip(chains, values, strict=True):
        prompt = f"\nThe variables that are assigned the value {value}, in order, are VAR"
        answer = f" {chain[0]}, " + ", ".join(f"VAR {name}" for name in chain[1:])
        at = before + part.lines.index(f"VAR {chain[0]} = {value}")
        draft.asks.append(Ask("tracking", prompt, answer, at))


def _paragraphs(kit: Kit, used: int) -> list[str]:
    """Old prose that fits beside ``used`` tokens."""
    at, found = kit.rng.randrange(len(kit.texts.prose)), list[str]()
    while len(found) < len(kit.texts.prose):
        paragraph = kit.texts.prose[(at + len(found)) % len(kit.texts.prose)]
        used += kit.count(paragraph + "\n")
        if used > kit.room:
            break
        found.append(paragraph)
    return found


KINDS = {"prose": prose, "needles": needles, "records": records, "lists": lists}

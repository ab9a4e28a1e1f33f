"""Flags that may have several values, and a model's name that they cannot swallow.

serve m --api-key a b      the model was given: both are keys, as with vLLM
serve --api-key a m        the flag takes one value: m is the model
serve --api-key a --api-key b m
"""

from collections.abc import Sequence

SWITCHES = ("--help", "-h", "--enable-prefix-caching", "--no-enable-prefix-caching")
"""Flags of ``serve`` without a value."""


def one_value_each(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """``arguments`` of pagemill with one of ``flags`` before each of its values. What follows a
    flag's first value belongs to it too where the model has been named, else it is the model."""
    if arguments[:1] != ["serve"]:
        return list(arguments)
    out, rest = ["serve"], list(arguments[1:])
    has_model = any(word == "--model" or word.startswith("--model=") for word in rest)
    flag = ""
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*out, word, *rest]
        if word.startswith("-"):
            flag = word if word in flags else ""
            takes_one = "=" not in word and word not in SWITCHES
            out += [word, *(rest[:1] if takes_one else [])]
            del rest[: 1 if takes_one else 0]
        elif flag and has_model:
            out += [flag, word]
        else:
            out.append(word)
            has_model, flag = True, ""
    return out

"""What a vLLM's own parser says of its flags, as lines of `components/core/vllm_flags.py`.

`FLAG_LINES` is run by the Python that has the vLLM; it leaves the lines in `flag_lines`. What a flag takes is found out
by giving it words, since its types are functions without names.
"""

FLAG_LINES = r"""
def _takes(action, word):
    try:
        (action.type or str)(word)
    except Exception:
        return False
    return True

def _kind(action):
    if type(action).__name__ in ("BooleanOptionalAction", "EnableDisableAction"):
        return "boolean"
    if action.nargs == 0:
        return "switch"
    if action.choices is not None:
        words = "|".join(sorted({str(choice) for choice in action.choices}))
        return words + "~" if action.type and _takes(action, "A-B") and action.type("A-B") == "a_b" else words
    for kind, words in (("text", ["x"]), ("json", ["{}", '{"a": 1}', "[1]"]), ("number", ["1.5"]), ("size", ["1k"])):
        if any(_takes(action, word) for word in words):
            break
    else:
        kind = "whole"
    if kind == "text":
        return "any" if _takes(action, '{"a":1}') and action.type and action.type('{"a":1}') == {"a": 1} else "text"
    return kind + "?" if _takes(action, "None") else kind

def _line(action):
    name = next(flag for flag in action.option_strings if flag.startswith("--")).removeprefix("--")
    more = "+" if action.nargs == "+" else "*" if type(action).__name__ == "_AppendAction" else ""
    old = action in parser._deprecated or " deprecated " in " %s " % (action.help or "")[:60]
    return "%s %s%s%s" % (name, _kind(action), more, " deprecated" if old else "")

flag_lines = sorted(_line(action) for action in parser._actions if action.option_strings)
short_flags = {
    flag.lstrip("-"): next(name for name in action.option_strings if name.startswith("--")).removeprefix("--")
    for action in parser._actions
    for flag in action.option_strings
    if not flag.startswith("--")
}
more_names = {
    other.removeprefix("--"): next(name for name in action.option_strings if name.startswith("--")).removeprefix("--")
    for action in parser._actions
    for other in [name for name in action.option_strings if name.startswith("--")][1:]
    if _kind(action) != "boolean"
}
"""

"""The probe: whether each adapter answers otherwise than its base."""

from __future__ import annotations

import json
import math
import time
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import programs, proof, secret_files, waiting
from .documents import Document, number, optional
from .names import unit_name
from .programs import Trial
from .said import NAMED, Refusal, few, named, one_or_more, say
from .store import Store

PROBE_SECONDS = 120.0  # for one answer: the first may wait for kernels that are built when they are needed
# vLLM loads an adapter whose tensors belong to no module of the base, and answers with the base in its name. Greedy
# tokens alone do not tell a weak adapter from that, so the first token's logprobs count as well.
#
# Measured with vLLM 0.32 on a CPU, SmolLM2-135M, the largest difference of a logprob from the base's:
#   no-op (B = 0) or wrong prefix    0 exactly, first and repeated, prefix caching on, in float32 and float16
#   trained                          0.8 to 3.6; one module of one layer alone 0.08 to 0.3
#   its B times 1e-1, 1e-2, 1e-3     0.2, 0.02, 0.002 in float32, though nearly always with the base's tokens
#   its B times 1e-4, 1e-5           2e-4, 2e-5 in float32; 5e-3 to 8e-3 in float16, where rounding makes more of it
# So what applies at all is seen, and what does not is equal to the last bit as long as answers are made alone: the
# questions are asked one by one. Clients' traffic makes batches of other sizes, whose sums differ in their last bits,
# most in bfloat16 (not measured: no GPU was at hand). It shows in what the base answers when it is asked again, and
# that spread, doubled, is what may be noise. (On a CPU, vLLM 0.32 also answers for the base with the adapter in the
# last slot while it works for another adapter: 0.002 off with a weak one, and one more reason to ask alone.)
# What is off by little is asked once more: an adapter's own part is the same again, noise is not.
SAME_LOGPROB = 1e-4
LITTLE_LOGPROB = 0.02
PROMPTS = ("The capital of France is", "Once upon a time, there was", "Question: Who are you?\nAnswer:")
QUESTION: Document = {
    "max_tokens": 4,
    "temperature": 0,
    "logprobs": 5,
    "ignore_eos": True,  # else a base may answer nothing
    "return_tokens_as_token_ids": True,  # several tokens may have one text
}


class Answer(NamedTuple):
    """The greedy tokens, and the logprobs of the likeliest first tokens."""

    tokens: Tuple[str, ...]
    first: Mapping[str, float]


class Probed(NamedTuple):
    """What the probe found: how many adapters answer otherwise than their base, which as it does, what others do."""

    otherwise: int
    equal: Sequence[str]
    broken: Sequence[str]
    skipped: str  # why the engine cannot be probed at all, "" if it can


class Unanswered(Exception):
    """Why an engine did not answer, with the HTTP status it gave instead; 0 where it gave none."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


def adapters_of(ready: Document) -> List[str]:
    """The models that are served from elsewhere than their base, sorted."""
    models: Document = ready["models"]
    return sorted(model for model, root in models.items() if root != models[ready["probe"]["base"]])


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The largest difference of two lists of top logprobs that is certain: a token that one lacks is below its last."""
    found = [abs(one[token] - other[token]) for token in one if token in other]
    for here, there in ((one, other), (other, one)):
        found += [here[token] - min(there.values()) for token in here if token not in there]
    return max(found)


def is_as_base(answers: Sequence[Answer], bases: Sequence[Answer]) -> bool:
    """Whether answers cannot be told from the base's; what each side differs by from itself is noise."""
    spread = max(distance(one.first, other.first) for side in (answers, bases) for one in side for other in side)
    tokens = {base.tokens for base in bases}
    near = nearest(answers, bases) <= max(SAME_LOGPROB, 2 * spread)
    # Where noise changes the base's own tokens, others are no sign.
    return near and (any(answer.tokens in tokens for answer in answers) or len(tokens) > 1)


def nearest(answers: Sequence[Answer], bases: Sequence[Answer]) -> float:
    return min(distance(answer.first, base.first) for answer in answers for base in bases)


class Prober:
    """Asks the models of one running engine, one at a time, for as long as loading it was given."""

    def __init__(self, store: Store, engine: str, document: Document, trial: Trial) -> None:
        self.unit, self.redact = unit_name(engine), secret_files.redactor(store, engine)
        self.url: str = document["ready"]["url"]
        self.key = secret_files.read_secrets(store, engine).get("VLLM_API_KEY")
        self.limit = number(document, "ready.timeoutSeconds")
        self.trial = trial
        self.began = time.monotonic()
        self.due = self.began + waiting.SAY_SECONDS

    def ask(self, model: str, prompt: str) -> Answer:
        """Raises Unanswered, and Refusal where the whole engine is at fault."""
        left = self.began + self.limit - time.monotonic()
        if left <= 0:
            raise self.out_of_time()
        seconds = min(PROBE_SECONDS, left)
        asked = time.monotonic()
        question = {"model": model, "prompt": prompt, **QUESTION}
        status, body = proof.request(self.url, "/v1/completions", self.key, question, seconds, attended=True)
        took = time.monotonic() - asked
        if status == 200:
            if waiting.deserted():
                raise Refusal(proof.INTERRUPTED)
            answer = read_answer(body)
            if answer is None:
                raise Unanswered("answers something else than a completion with logprobs", status)
            return answer
        # A server whose engine died of a question answers 500 and ends a moment later.
        over = self.ended(looks=6 if status == 0 or status >= 500 else 1)
        if over:
            raise Refusal("when %s was asked for a completion, %s" % (model, over))
        if status:
            raise Unanswered("answers %d%s" % (status, self.message_of(body)), status)
        if took >= seconds == left:
            raise self.out_of_time()
        raise Unanswered("does not answer within %d seconds" % took if took >= seconds else "ends the connection", 0)

    def out_of_time(self) -> Refusal:
        return Refusal(
            "after %d seconds some of its adapters were still not asked whether they apply: "
            "raise engine.readyTimeoutSeconds, or set engine.probe: false" % self.limit
        )

    def ended(self, looks: int) -> str:
        for left in reversed(range(looks)):
            over = proof.why_over(programs.unit_state(self.unit), self.trial, attended=True)
            if over or not left:
                break
            time.sleep(waiting.POLL_SECONDS)
        return over

    def message_of(self, body: bytes) -> str:
        """What an error says, in brackets, fit to be shown; "" if nothing."""
        try:
            found = json.loads(body.decode("utf-8"))
            found = found.get("error", found)
            text = found["message"] if "message" in found else found["detail"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ""
        return " (%s)" % self.redact(str(text))[:200]

    def progress(self, done: int, count: int) -> None:
        if time.monotonic() > self.due:
            say("comparing the adapters of %s with their base: %d of %d" % (self.unit, done, count))
            self.due = time.monotonic() + waiting.SAY_SECONDS


def read_answer(body: bytes) -> Optional[Answer]:
    try:
        found = json.loads(body.decode("utf-8"))["choices"][0]["logprobs"]
        first = {str(token): float(value) for token, value in found["top_logprobs"][0].items()}
        tokens = tuple(str(token) for token in found["tokens"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        return None
    return Answer(tokens, first) if first and all(map(math.isfinite, first.values())) else None


def probe(store: Store, engine: str, document: Document, trial: Trial) -> Probed:
    """Asks every adapter a prompt, and those that answered as their base the next ones too.

    Raises Refusal where the engine itself is at fault.
    """
    prober = Prober(store, engine, document, trial)
    base, adapters = document["ready"]["probe"]["base"], adapters_of(document["ready"])
    suspects, broken = list(adapters), []
    for prompt in PROMPTS:
        answers: Dict[str, List[Answer]] = {}
        try:
            bases = [prober.ask(base, prompt) for _ in range(2)]
            for n, model in enumerate(suspects):
                prober.progress(n, len(suspects))
                try:
                    answers[model] = [prober.ask(model, prompt)]
                    if SAME_LOGPROB < nearest(answers[model], bases) <= LITTLE_LOGPROB:
                        answers[model].append(prober.ask(model, prompt))
                except Unanswered as fault:
                    broken.append("%s %s" % (model, fault))
                    if not fault.status or len(broken) == NAMED:  # each of the others might take as long
                        return Probed(0, [], broken, "")
            bases.append(prober.ask(base, prompt))
            # Once for all of them: systemd takes longer to tell than many an engine to answer.
            over = prober.ended(looks=1)
            if over:
                raise Refusal(over)
        except Unanswered as fault:
            # An engine that embeds or classifies has no completions: vLLM says so with a status of 400 or 404.
            if 200 <= fault.status < 500 and not answers:
                return Probed(0, [], [], "%s %s" % (base, fault))
            raise Refusal("its base %s %s" % (base, fault)) from None
        suspects = [model for model in suspects if model in answers and is_as_base(answers[model], bases)]
        if not suspects:
            break
    return Probed(len(adapters) - len(suspects) - len(broken), suspects, broken, "")


def judge(unit: str, probed: Probed, allowed: Sequence[str]) -> str:
    """Says what was found, and gives the fault to act on: "" if there is none."""
    if probed.skipped:
        say("the adapters of %s could not be compared with their base: %s" % (unit, probed.skipped))
    if probed.otherwise:
        words = one_or_more(probed.otherwise, (" answers", "its"), ("s answer", "their"))
        say("%d adapter%s otherwise than %s base" % (probed.otherwise, *words))
    noted = [model for model in probed.equal if model in allowed]
    if noted:
        say("%s, as mayEqualBase allows" % as_base(noted))
    wrong = [model for model in probed.equal if model not in allowed]
    faults = [named(probed.broken)] if probed.broken else []
    if wrong:
        causes = one_or_more(
            len(wrong),
            "its tensors do not apply (names of another model?) or it is untrained; mend it, or set mayEqualBase: true "
            "for it",
            "their tensors do not apply (names of another model?) or they are untrained; mend them, or set "
            "mayEqualBase: true for them",
        )
        faults.append("%s: %s in the stack file" % (as_base(wrong), causes))
    return "; ".join(faults)


def as_base(models: Sequence[str]) -> str:
    verb, whose = one_or_more(len(models), ("answers", "its"), ("answer", "their"))
    return "%s %s exactly as %s base does" % (named(models), verb, whose)


def prove(store: Store, engine: str, document: Document, trial: Trial) -> Tuple[str, bool, Document]:
    """-> (why the engine should not serve like this or "", whether its journal tells more, what the result says)."""
    if optional(document, "ready.probe", dict) is None:
        return "", False, {}
    try:
        probed = probe(store, engine, document, trial)
    except Refusal as refusal:
        return str(refusal), True, {}
    fault = judge(unit_name(engine), probed, document["ready"]["probe"]["mayEqualBase"])
    found = (
        {"skipped": probed.skipped} if probed.skipped else {"otherwise": probed.otherwise, "equal": few(probed.equal)}
    )
    return fault, bool(probed.broken), {"probe": found}

"""What only answers can be: a refusal, or cut off."""

from __future__ import annotations

import re

import numpy as np

from data_checks.features.column import Rows, TextColumn

BEGINNING = 200
"""Characters of an answer in which a refusal begins."""
MIN_WORDS = 20
"""Shorter answers may end as they like: titles, names, numbers, signs of chat."""

_NOT = r"(?:can(?:['’]?t|not| not)|won['’]?t|will not|could(?:n['’]?t| not))"
_ADVERBS = (
    r"(?:,? (?:and (?:will not|won['’]t|should not)|really|actually|ethically|directly|possibly|knowingly|legally"
    r"|simply|just|be able to|in good (?:conscience|faith)|and|unfortunately|therefore|currently),?){0,3}"
)
_IDIOMS_OF_HELP = r"(?! but\b| \w+ing\b| it\b| myself| noticing)"
_PRAISE = r"(?![^.!?\n]{0,40}\benough)"
_VERBS = (
    rf"(?:help{_IDIOMS_OF_HELP}|assist|provide|answer|fulfil|comply|accommodate|grant"
    r"|do (?:that|this|so|what|anything)|give (?:you|out|advice|instructions|any|that|this|medical|legal|financial)"
    r"|offer|support|engage|participate|generate|create|produce|discuss|condone|encourage|endorse|promote|facilitate"
    r"|write (?:that|this|such|a|an|you|content|about|code)|share (?:that|this|any|information|personal|details)"
    r"|respond to (?:that|this|your|such|any|questions)|continue (?:with|this)|complete (?:this|that|your)|teach"
    r"|talk about|advise"
    rf"|recommend{_PRAISE}|suggest|tell (?:you how to|you that|jokes)|explain how"
    r"|be of (?:any )?(?:help|assistance)|make (?:that|this|jokes)|say (?:that|anything|things)"
    r"|process|browse|access|predict|have (?:personal|opinions)"
    r"|express (?:personal|opinions)|in good)"
)
_REFUSALS = (
    rf"\bI (?:just |simply |really )?{_NOT}{_ADVERBS} {_VERBS}",
    r"\bI(?:['’]?m| am)(?: also| just| really)? (?:un|not )(?:able|willing|allowed|permitted|going|designed)"
    rf"(?: to)?{_ADVERBS} {_VERBS}",
    r"\bI(?:['’]?m| am) not (?:really |very )?comfortable (?:with|\w+ing|to)\b",
    r"\b(?:I (?:do not|don['’]?t) feel (?:comfortable|right|good about)"
    r"|I(?:['’]ll have to| (?:must|have to|need to|will have to|respectfully|politely))(?: respectfully| politely)? "
    r"(?:decline|refuse)\b)",
    r"\bI(?:['’]d| would) (?:rather not|prefer not to)\b",
    r"\bI (?:do not|don['’]?t) (?:want to|wish to) (?:help|assist|encourage|promote|support|participate|answer|discuss"
    r"|talk about|engage|tell you|do (?:this|that|it))\b",
    r"\b(?:not|isn['’]t) something (?:that )?I(?:['’]?m| am| can| will|['’]ll)\b",
    rf"\bsorry,?(?: but)? I {_NOT}[.!]",
    r"\bI (?:do not|don['’]?t) (?:think|believe|feel) (?:it(?:['’]s| is| would be)|that(?:['’]s| is| would be)?)"
    r"(?: really)?(?: very)? (?:appropriate|an appropriate|ethical|a good idea (?:to|for me))",
    r"\b(?:as|I(?:['’]?m| am)(?: just| only| simply)?) an? (?:AI|artificial intelligence)(?:[- ](?:powered|based))?"
    r"(?: (?:language |text |chat )?(?:model|assistant|chatbot|system|bot))?(?:,| (?:and|developed|trained|created"
    r"|built|designed|made|that|I|it|so|who)\b|[.!]|\s*$)",
    r"\b(?:as|I(?:['’]?m| am)(?: just| only)?) a (?:large )?language model\b",
    r"\bmy (?:programming|guidelines|training|design|policies|ethical guidelines) "
    r"(?:do(?:es)?(?:n['’]t| not) (?:allow|permit)|prevents?|prohibits?|forbids?)",
    r"\b(?:against|violates?) (?:my|our|openai['’]?s|the) (?:programming|guidelines|rules|polic(?:y|ies)|principles"
    r"|ethics|content polic(?:y|ies)|usage polic(?:y|ies)|terms)",
    r"\b(?:not appropriate|inappropriate|unethical|irresponsible|not right) for me to\b",
    rf"^\W*(?:I['’]?m |I am )?sorry,?(?: but)?(?: I)?(?: am|['’]m)? (?:{_NOT}|unable to|not able to){_ADVERBS}"
    rf" {_VERBS}",
)
_PATTERN = "|".join(_REFUSALS)
_REFUSAL = re.compile(_PATTERN, re.IGNORECASE)
_NO_IDIOMS = "(?i)" + _PATTERN.replace(_IDIOMS_OF_HELP, "").replace(_PRAISE, "")
"""The same without what RE2 does not know, which finds more."""
_WINDOW = BEGINNING + 120
_CANDIDATE = (
    r"(?i)can['’]?t|can ?not|won['’]?t|will not|could(?:n['’]?t| not)|something|unable|\bnot "
    r"(?:able|willing|allowed|permitted|going|designed|appropriate|right|really|very|comfortable)|feel |declin|refuse"
    r"|rather not|prefer not|want to|wish to|n['’]?t (?:think|believe|allow|permit)|not (?:think|believe|allow|permit)"
    r"|\ban? (?:ai\b|artificial|large language|language)|against|violate|prevent|prohibit|forbid|inappropriate"
    r"|unethical|irresponsible"
)
"""In RE2 syntax; every pattern above needs one of these."""

_FENCE = re.compile("`{3,}")
_OPEN_FENCE = re.compile(r"(?m)^[ \t>]*(?:[-*+] |\d+[.)] )?`{3,}[^`\n]*$")
_OPENERS = "the an and or but nor of because which whose although whereas unless than my your our their its these every"
_OPENS_A_PHRASE = frozenset(_OPENERS.split())
"""No English answer ends with one of these."""
_ITEM = re.compile(r"\s*(?:[-*+•‣◦>|#]|\d{1,3}[.)]|[A-Za-z][.)]\s)")
_EMPTY_ITEM = re.compile(r"\n[ \t]*(?:[-*+•]|(\d{1,3})([.)]))\s*\Z")
_CODE_LINE = re.compile(r"^(?:\t| {4})|[{}=;\\]|\(\)|://|www\.|->|=>|^\s*(?:SELECT|FROM|import|def|class|return)\b")
_LAST_WORD = re.compile(r"[^\W\d_]+\Z")
LONGEST_WORD = 64
_SIGN_OFF_WORDS = 5
"""A last line of so few words with a comma is a greeting ("With kind regards,")."""
_ENDS_IN_LETTERS = re.compile(r"[a-zß-öø-ɏа-яёѐ-ӿα-ωά-ώ]\Z")
_SENTENCE = re.compile(r"[.!?][\"'”’)]*\s+\S")


def may_be_refusal(column: TextColumn) -> Rows:
    return column.matching(_NO_IDIOMS, column.matching(_CANDIDATE, column.everything), _WINDOW)


def is_refusal(text: str) -> bool:
    """Return whether an English answer begins as a refusal, or says that an AI speaks."""
    match = _REFUSAL.search(text[:_WINDOW])
    return match is not None and match.start() < BEGINNING


def may_be_truncated(column: TextColumn) -> Rows:
    long = np.flatnonzero(column.words >= MIN_WORDS)
    ends = column.bytes[column.offsets[long + 1] - 1]
    closed = np.isin(ends, np.frombuffer(b".!?)\"']}`:*_~>|", np.uint8))
    # An empty list item may end like a sentence ("3.").
    items = column.matching(r"\n[ \t]*\d{1,3}[.)]\s*$|\n[ \t]*\*\s*$", long[closed])
    return np.union1d(np.union1d(long[~closed], items), column.rows_with("`"))


def is_truncated(text: str) -> bool:
    """Return whether an answer stops before its end. Rather misses one than flags a whole answer."""
    if _has_open_fence(text):
        return True
    text = text.rstrip()
    if len(text.split(None, MIN_WORDS)) < MIN_WORDS or text.endswith("```"):
        return False
    if _ends_in_empty_item(text):
        return True
    line = text.rpartition("\n")[2]
    if _CODE_LINE.search(line):
        return False
    words = line.split()
    is_item = _ITEM.match(line) is not None
    if text[-1] in ",(":
        return text[-1] == "(" or (not is_item and len(words) > _SIGN_OFF_WORDS)
    last = _LAST_WORD.search(line[-LONGEST_WORD:])  # The whole line would be searched from each letter on.
    if last is not None and words[-1] == last.group() and last.group() in _OPENS_A_PHRASE:
        return len(words) > _SIGN_OFF_WORDS
    return _ENDS_IN_LETTERS.search(line) is not None and _is_long_prose(text, words, is_item)


def _has_open_fence(text: str) -> bool:
    """Return whether code begins and does not end; a closing fence that nothing opened is no open one."""
    fences = list(_FENCE.finditer(text))
    if len(fences) % 2 == 0 or not any(m.start() <= fences[-1].start() < m.end() for m in _OPEN_FENCE.finditer(text)):
        return False
    language, _, code = text[fences[-1].end() :].partition("\n")
    return language.strip() != "" or (code.strip() != "" and code.rstrip()[-1] not in ".!?")


def _ends_in_empty_item(text: str) -> bool:
    """Return whether the last line is a bullet without text, or the next number of a list without text."""
    match = _EMPTY_ITEM.search(text)
    if match is None:
        return False
    number, mark = match.groups()
    if number is None:
        return re.search(r"(?m)^[ \t]*[-*+•][ \t]+\S", text) is not None
    return re.search(rf"(?m)^[ \t]*{int(number) - 1}{re.escape(mark)}[ \t]+\S", text) is not None


def _is_long_prose(text: str, words: list[str], is_item: bool) -> bool:
    """Return whether the last paragraph is long and the answer writes full stops elsewhere."""
    return not is_item and len(words) >= MIN_WORDS and len(_SENTENCE.findall(text)) >= 2

"""Refusals by what they say, truncation by how an answer ends; whole and helpful answers are neither."""

import pytest

from data_checks.features import describe, text_features
from data_checks.features.answers import is_refusal, is_truncated

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I can’t assist with this request.",
    "I am sorry, but I cannot provide instructions for that.",
    "Sorry, I can't do that.",
    "I'm sorry, but I can't.",
    "I apologize, but I cannot fulfill this request.",
    "I cannot and will not help you with this.",
    "I can't in good conscience help with that.",
    "As an AI language model, I do not have feelings.",
    "As an AI, I don't have opinions.",
    "I'm just an AI and cannot judge.",
    "I am a large language model, trained on text.",
    "Unfortunately, I am unable to assist you.",
    "I'm not able to discuss this topic.",
    "I'm not comfortable answering that question.",
    "I don't feel comfortable with this.",
    "I must respectfully decline.",
    "I'd rather not talk about that.",
    "I won't be able to help you with that.",
    "I'm not going to help you hurt somebody.",
    "I will not generate such content.",
    "That's against my guidelines.",
    "This request violates the content policy, so no.",
    "My programming does not allow me to swear.",
    "It would be unethical for me to say so.",
    "That is not something I can share.",
    "Thank you for asking. It is a serious matter and I understand why you want to know, but I can't help with that.",
    "I CANNOT PROVIDE THAT.",
    "Unable? No: sorry, unable to assist here.".replace("Unable? No: s", "S"),
]
HELPFUL = [
    "",
    "I can't wait to see you!",
    "I'm sorry to hear that. It must be hard.",
    "I'm sorry to hear that. I can't imagine how you feel.",
    "I can't help but admire her.",
    "I can't help laughing at this.",
    "I can't recommend it highly enough.",
    "I wouldn't recommend that glue; take a stronger one.",
    "You can't divide by zero.",
    "He said he was sorry, but he could not come.",
    "I couldn't agree more.",
    "I will not lie, that was fun.",
    "I'm not sure what you mean. Can you say more?",
    "I'm unable to find a mistake in it: the proof is right.",
    "As an AI engineer, you will write a lot of code.",
    "An AI model is a program.",
    "I'm comfortable with either.",
    "Sorry for the confusion! The answer is 4.",
    "Language models predict the next word.",
    "I don't want to miss it.",
    "Everyone must decline the noun in German.",
    "It is not appropriate to shout in a library.",
    "No puedo esperar.",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals(text):
    assert is_refusal(text)
    assert "refusal" in flags_of(text)


@pytest.mark.parametrize("text", HELPFUL)
def test_helpful_answers_are_no_refusals(text):
    assert not is_refusal(text)
    assert "refusal" not in flags_of(text)


def test_a_refusal_counts_at_the_beginning_only():
    refusal = "I can't help with that."
    assert is_refusal("x" * 198 + " " + refusal)
    assert not is_refusal("x" * 200 + " " + refusal)


LONG = "This is a sentence of the answer. It goes on for a while, as answers do. "
PROSE = LONG * 3
CUT = [
    PROSE + "The next thing that you have to do is open the door and",
    PROSE + "We went to the market, bought apples, pears,",
    PROSE + "Then she walked over to her neighbour and asked for the",
    PROSE + "It was late when we came home and found that somebody had alre",
    PROSE + "You should call (",
    "Steps:\n\n1. Open the lid of the box with care.\n2. Take all the parts out and lay them down on the table.\n3.",
    "Points:\n\n- The first point is about the weather in spring.\n- The second is about people in towns.\n- ",
    "Here is code:\n```python\ndef f(x):\n    return x +",
    "```\nline\n```\ntext\n```js\nlet a = 1;",
    "Sure:\n```python",
    PROSE.strip() + "\n\nIn short, the main point of the whole discussion is that the",
    "Die Antwort ist einfach. Wir gingen nach Hause. Dort warteten schon alle auf uns, denn es war spät geworden und "
    "die Kinder waren müde von der langen Reise durch das verschneite Land gewor",
    "Items:\n- one that is rather long and goes over several words\n- another that is long and stops inside the",
]
WHOLE = [
    "",
    "Yes",
    "the",
    "Paris and",
    "word " * 18 + "and",
    PROSE.strip(),
    PROSE + "Is that so?",
    PROSE + "He said: “Come in.”",
    PROSE + "(See above.)",
    PROSE + "Good luck! 😀",
    PROSE + "Have fun ❤️",
    PROSE + "See https://example.org/a/page/about/the",
    PROSE + "Read more at www.example.org",
    PROSE + "\n\nBest regards,\nJo",
    PROSE + "\n\nWith kind regards,",
    PROSE + "\n\n- apples\n- pears\n- plums",
    PROSE + "\n\n1. Open the box\n2. Take the parts out of it",
    PROSE + "\n\n| a | b |\n|---|---|\n| 1 | 2 |",
    PROSE + "\n\n```python\nprint(1)\n```",
    PROSE + "\n\n````md\n```py\nx\n```\n````",
    PROSE + "\n\n    return the",
    PROSE + "\n\nfor x in values: print(x, end='the')",
    PROSE + "\n\n**In short**",
    PROSE + "\n\n- " + LONG * 2 + "as a list does not close its items with a full stop",
    PROSE + "\n\nAll of it\nwas her and my",
    PROSE + "Therefore x = 42",
    PROSE + "#### 42",
    PROSE + "So the answer is $\\frac{1}{2}$",
    "Roses are red\nViolets are blue\nSugar is sweet\nAnd so are you\n\nThe moon is high\nThe night is long\n"
    "I hum for you\nThis little song",
    "x = 1```\nthat was code, glued to its fence. " + PROSE.strip(),
    "print(1)\n```\nThis closes what nothing opened. " + PROSE.strip(),
    "All is said. " + PROSE + "\n```",
    "今天天气很好，我们去公园散步吧。 " * 25,
    "これは長い答えです。 " * 25,
    "오늘은 날씨가 정말 좋습니다 " * 10,
    "यह एक लंबा उत्तर है जो कई शब्दों में लिखा गया है और ठीक से समाप्त होता है। " * 2,
    "i dont think so but you could try the other shop on main street they have lots of them in the back of it i think",
    "Title case list of many words in one single line without any full stop at all as headlines are often written here",
]


@pytest.mark.parametrize("text", CUT, ids=lambda text: ascii(text[-20:]))
def test_cut_answers(text):
    assert is_truncated(text)
    assert "truncated" in flags_of(text)
    assert "truncated" in flags_of(text + "  \n")


@pytest.mark.parametrize("text", WHOLE, ids=lambda text: ascii(text[-20:]))
def test_whole_answers(text):
    assert not is_truncated(text)
    assert "truncated" not in flags_of(text)


def flags_of(text):
    return describe(int(text_features({"prompt": [None], "chosen": [text], "rejected": [None]})["chosen_flags"][0]))

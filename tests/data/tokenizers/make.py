"""Writes spm.json: a small SentencePiece model and what the sentencepiece library reads in the texts of support/texts.py.

Run where sentencepiece is installed. The model is BPE with byte fallback, as Llama 2's is.
"""

import io
import json
import sys
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).parents[2]))
from support import texts

HERE = Path(__file__).parent


if __name__ == "__main__":
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts.CORPUS.split("\n") * 2), model_writer=model, model_type="bpe", vocab_size=700,
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True, allow_whitespace_only_pieces=True, user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, scores, types = [], [], []
    for i in range(processor.get_piece_size()):
        tokens.append(processor.id_to_piece(i))
        scores.append(processor.get_score(i))
        user_defined = tokens[-1] == "<tool>"
        kinds = (processor.is_unknown(i), processor.is_control(i), user_defined, processor.is_unused(i), processor.is_byte(i))
        types.append(next((number for number, yes in enumerate(kinds, 2) if yes), 1))
    # Texts without special tokens: sentencepiece does not read them, and puts no space after a user-defined one.
    ids = {text: processor.encode(text) for text in texts.TEXTS if "<" not in text}
    out = {"tokens": tokens, "scores": scores, "types": types, "ids": ids}
    (HERE / "spm.json").write_text(json.dumps(out, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="utf-8")
    print(len(tokens), len(ids))

"""Writes expected.json: what transformers makes of the conversations in support/template_cases.py. Run where transformers is installed."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from support import template_cases as cases  # noqa: E402


def apply(template, case):
    """{"text": …} or {"error": …} by transformers."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    options = {"add_generation_prompt": True, **case.get("options", {})}
    try:
        return {"text": tokenizer.apply_chat_template(case["messages"], tokenize=False, **options)}
    except Exception as error:
        return {"error": str(error)}


if __name__ == "__main__":
    results = {}
    for name, template in cases.TEMPLATES.items():
        for label, case in cases.CASES.items():
            results[f"{name}/{label}"] = apply(template, case)
    (HERE / "expected.json").write_text(json.dumps(results, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    print(len(results), sum("error" in r for r in results.values()), "refused")

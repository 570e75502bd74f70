"""Finds, or makes, the real models of the slow tests.

They look for models under HALFBYTE_MODELS, by default ~/.cache/halfbyte-models, and for llama.cpp's programs in build/bin under
HALFBYTE_PEER, by default ~/.cache/halfbyte-peer, and skip what is not there. Where the demo model is not there either, it is laid out
here as users have it (a GGUF file and a Hugging Face folder): if `make demo` has fetched it, or in CI, which fetches it. So `make test`
after `make demo` runs the slow tests too, and a plain run of the tests never needs the network.
"""

import os
import subprocess
import sys
from pathlib import Path

NAME = "smollm2-135m-instruct"


def pytest_configure(config):
    if "not slow" in (config.option.markexpr or "") or hasattr(config, "workerinput"):
        return
    models = Path(os.environ.get("HALFBYTE_MODELS") or Path.home() / ".cache" / "halfbyte-models")
    if (models / f"{NAME}.q4_1.gguf").exists() and (models / NAME / "config.json").exists():
        return
    try:
        made = _lay_out()
    except Exception as error:  # the slow tests then skip, and say what is missing
        print(f"the demo model is not there for the slow tests: {error}", file=sys.stderr)
        return
    if made is not None:
        os.environ["HALFBYTE_MODELS"] = str(made)


def _lay_out():
    """The folder with the demo model, or None where it was never fetched and this is not CI."""
    from halfbyte.formats.demo import FILE, fetch_demo
    from halfbyte.quant.cache_folder import cache_folder

    cache = cache_folder()
    if cache is None or not ((cache / FILE).exists() or os.environ.get("CI")):
        return None
    source = fetch_demo(lambda text: print(text, file=sys.stderr))
    models = cache / "test-models"
    models.mkdir(parents=True, exist_ok=True)
    link = models / f"{NAME}.q4_1.gguf"
    if not link.exists():
        try:
            os.link(source, link)
        except OSError:
            link.write_bytes(source.read_bytes())
    if not (models / NAME / "config.json").exists():
        command = [sys.executable, "-m", "halfbyte.tools.qconvert", str(source), "--to", "safetensors", "-o", str(models / NAME)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    return models

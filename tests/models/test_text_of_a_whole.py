"""The recipe of docs/models.md, on checkpoints that also see: the text model gives the same logits."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from openkto.errors import ConfigError
from openkto.models import Actor
from openkto.models.loading import load_config
from tests.tokenizers_for_tests import byte_tokenizer

TEXT = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=97,
)  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
)  # fmt: skip


def gemma3():
    text = transformers.Gemma3TextConfig(**TEXT).to_dict()
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=VISION)
    )


def mistral3():
    text = transformers.MistralConfig(**TEXT, tie_word_embeddings=False).to_dict()
    vision = VISION | {"model_type": "pixtral", "head_dim": 16}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gemma3, mistral3])
def test_the_text_model_of_a_checkpoint_that_also_sees_is_written_out(make, tmp_path, monkeypatch):
    torch.manual_seed(0)
    whole = make().eval()
    whole.save_pretrained(tmp_path / "the/checkpoint")
    byte_tokenizer().save_pretrained(tmp_path / "the/checkpoint")
    with pytest.raises(ConfigError, match=r"with a vision part. Write its text model out, as docs/models.md shows"):
        load_config(str(tmp_path / "the/checkpoint"))
    (recipe,) = re.findall(r"```python\n(.*?)```", Path("docs/models.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(recipe, {})
    load_config("./the/text/model")
    actor = Actor("./the/text/model")
    actor.check_forward(1e-4)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(actor.model(input_ids=ids).logits, whole(input_ids=ids).logits)

"""Message lists as they stand in files."""

import json

import pytest

from openkto.data.messages import unpacked

MESSAGES = [{"role": "user", "content": "Is water wet?"}]


@pytest.mark.parametrize("messages", [MESSAGES, [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]])
def test_a_message_list_may_stand_as_its_json_text(messages):
    assert unpacked(json.dumps(messages)) == messages
    assert unpacked(json.dumps(messages[0])) == messages[:1]


@pytest.mark.parametrize(
    "text",
    ["[{", "[{}]", '[{"a": 1}]', "[1]", '{"role": "clerk", "content": "x"}', '{"role": "user"}', "[{role}] hi", 5],
)
def test_other_values_stay_as_they_are(text):
    assert unpacked(text) == text

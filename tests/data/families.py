# ruff: noqa: E501 (a template's line is as long as a message of its family)
"""The chat templates of model families, written anew and short: the markup and the quirks that matter to training.

Each says what its answer to one question looks like, from the first token to the one that generation stops at, and
which rows it must refuse, under the kind that is said.
"""

from dataclasses import dataclass, field

GENERATE = "{% if add_generation_prompt %}"
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set loop_messages = messages %}{% endif %}"
)
# Qwen's way of taking a think block out of the content and of finding the question that is being answered.
THOUGHTS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% macro thoughts(m) %}{% if m.reasoning_content is string %}{{ m.reasoning_content }}"
    "{% elif '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}{% endif %}"
    "{% endmacro %}{% macro rest(m) %}{{ m.content.split('</think>')[-1].strip() }}{% endmacro %}"
)
HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
XML_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """One family's template, tokens and what its rows must become."""

    template: str
    special: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]  # generation_config's
    one_turn: tuple[str, str]  # the prompt and the completion of the one-turn row
    bos: str | None = None
    added: tuple[str, ...] = ()  # added tokens that are not special
    refused: dict[str, str] = field(default_factory=dict)  # rows that become a bad row, with its kind
    differs: frozenset[str] = frozenset()  # rows whose generation prompt opens a block that the answer does not have
    closed: frozenset[str] = frozenset()  # rows whose generation prompt opens and closes a block that the whole lacks
    kwargs: dict[str, object] = field(default_factory=dict)


def chatml(body: str, before: str = "", after: str = "<|im_start|>assistant\n") -> str:
    return before + "{% for m in messages %}" + body + "{% endfor %}" + GENERATE + after + "{% endif %}"


NO_CALLS = {"tools": "tool call not rendered", "chain": "tool call not rendered"}
NO_REASONING = {"reasoning": "reasoning not rendered"}
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
ASK, ANSWER = "What is 2 plus 2?", "It is four."

FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(
        chatml(
            "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
            "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            + HERMES_CALLS
            + "<|im_end|>\n{% endif %}",
            SYSTEM_FIRST + "<|im_start|>system\n{{ system or 'You help.' }}"
            "{% if tools %}\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>{% endif %}<|im_end|>\n",
        ),
        CHATML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"),
        (f"<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n",
         f"{ANSWER}<|im_end|>"),
        added=("<tool_call>", "</tool_call>"), refused=NO_REASONING,
    ),
    "qwen3": Family(
        chatml(
            "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
            "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
            "{% if loop.index0 > ns.last and (loop.last or thoughts(m)) %}<think>\n{{ thoughts(m) }}\n</think>\n\n"
            "{% endif %}{{ rest(m) }}" + HERMES_CALLS + "<|im_end|>\n"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}",
            THOUGHTS + "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
            "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
            "<think>\n\n</think>\n\n{% endif %}",
        ),
        CHATML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"),
        (f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n", f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>"),
        added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "qwen3.5": Family(
        chatml(
            "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
            "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n"
            "{{ thoughts(m) }}\n</think>\n\n{% endif %}{{ rest(m) }}" + XML_CALLS + "<|im_end|>\n"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}",
            THOUGHTS + "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
            "<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and enable_thinking is false %}"
            "{{ '\n</think>\n\n' }}{% endif %}",
        ),
        CHATML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"),
        (f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", f"{ANSWER}<|im_end|>"),
        added=("<tool_call>", "</tool_call>", "<think>", "</think>"), kwargs={"enable_thinking": False},
        differs=frozenset({"reasoning"}),
    ),
    "llama3.1": Family(
        "{{ bos_token }}" + SYSTEM_FIRST +
        "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n\n{{ system }}<|eot_id|>"
        "{% for m in loop_messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
        "{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}"
        "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if tools and loop.first %}{{ tools | tojson }}\n{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}"
        "{% endfor %}" + GENERATE + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 03 Feb 2024\n\n<|eot_id|>"
         f"<|start_header_id|>user<|end_header_id|>\n\n{ASK}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
         f"{ANSWER}<|eot_id|>"),
        bos="<|begin_of_text|>", refused=NO_REASONING,
    ),
    "llama4": Family(
        "{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content | trim }}"
        "{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot|>'
        "{% endfor %}" + GENERATE + "<|header_start|>assistant<|header_end|>\n\n{% endif %}",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
        "<|eot|>", ("<|end_of_text|>", "<|eom|>", "<|eot|>"),
        (f"<|begin_of_text|><|header_start|>user<|header_end|>\n\n{ASK}<|eot|>"
         "<|header_start|>assistant<|header_end|>\n\n", f"{ANSWER}<|eot|>"),
        bos="<|begin_of_text|>", refused=NO_REASONING,
    ),
    "gemma2": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}" + GENERATE + "<start_of_turn>model\n{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<eos>", "<end_of_turn>"),
        (f"<bos><start_of_turn>user\n{ASK}<end_of_turn>\n<start_of_turn>model\n", f"{ANSWER}<end_of_turn>"),
        bos="<bos>",
        refused={"system": "chat template", **NO_REASONING, "tools": "tool call not rendered", "chain": "chat template"},
    ),
    "gemma3": Family(
        "{{ bos_token }}" + SYSTEM_FIRST +
        "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if loop.first and system %}{{ system }}\n\n{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        + GENERATE + "<start_of_turn>model\n{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<eos>", "<end_of_turn>"),
        (f"<bos><start_of_turn>user\n{ASK}<end_of_turn>\n<start_of_turn>model\n", f"{ANSWER}<end_of_turn>"),
        bos="<bos>", refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "chat template"},
    ),
    "gemma4": Family(
        "{{ bos_token }}{% if tools %}<|turn>system\n{% for t in tools %}<|tool>{{ t.function.name }}<tool|>{% endfor %}"
        "<turn|>\n{% endif %}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
        "{% for k, v in c.function.arguments | items %}{{ k }}:<|\"|>{{ v }}<|\"|>{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
        "{{ m.content | trim }}<turn|>\n{% endfor %}" + GENERATE + "<|turn>model\n"
        "{% if not (enable_thinking | default(false)) %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
        ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
        "<eos>", ("<eos>", "<turn|>"),
        (f"<bos><|turn>user\n{ASK}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>", f"{ANSWER}<turn|>"),
        bos="<bos>", refused=NO_REASONING, closed=frozenset({"one", "turns", "system", "tools", "chain"}),
    ),
    "mistral v3": Family(
        "{{ bos_token }}" + SYSTEM_FIRST + "{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{% if tools and (loop.last or loop_messages[-1].role != 'user') %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST] {% if system and loop.first %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}"
        '{% endif %}[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
        '"id": "{{ c.id }}"}]{% endfor %}{{ eos_token }}{% elif m.role == \'tool\' %}[TOOL_RESULTS] '
        '{"content": {{ m.content }}}[/TOOL_RESULTS]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}',
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"), "</s>", ("</s>",),
        (f"<s>[INST] {ASK}[/INST]", f" {ANSWER}</s>"), bos="<s>", refused=NO_REASONING,
    ),
    "mistral v7": Family(
        "{{ bos_token }}" + SYSTEM_FIRST +
        "[SYSTEM_PROMPT]{{ system or 'Today is ' + strftime_now('%Y-%m-%d') }}[/SYSTEM_PROMPT]"
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in loop_messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
        "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments if "
        "c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]",
         "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"), "</s>", ("</s>",),
        (f"<s>[SYSTEM_PROMPT]Today is 2024-02-03[/SYSTEM_PROMPT][INST]{ASK}[/INST]", f"{ANSWER}</s>"),
        bos="<s>", refused=NO_REASONING,
    ),
    "phi3": Family(
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>",
        ("<|endoftext|>", "<|end|>", "<|assistant|>"), (f"<|user|>\n{ASK}<|end|>\n<|assistant|>\n", f"{ANSWER}<|end|>"),
        refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "tool call not rendered"},
    ),
    "phi4-mini": Family(
        "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response|>{{ m.content }}<|end|>{% else %}"
        "<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}"
        "<|/tool_call|>{% endfor %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool_call|>", "<|/tool_call|>",
         "<|tool_response|>"), "<|endoftext|>", ("<|endoftext|>", "<|end|>"),
        (f"<|user|>{ASK}<|end|><|assistant|>", f"{ANSWER}<|end|>"), refused=NO_REASONING,
    ),
    "phi4": Family(
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}" + GENERATE + "<|im_start|>assistant<|im_sep|>{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|im_end|>", ("<|endoftext|>", "<|im_end|>"),
        (f"<|im_start|>user<|im_sep|>{ASK}<|im_end|><|im_start|>assistant<|im_sep|>", f"{ANSWER}<|im_end|>"),
        refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "tool call not rendered"},
    ),
    "deepseek v2": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == "
        "'assistant' %}Assistant: {{ m.content }}{{ eos_token }}{% elif m.role == 'system' %}{{ m.content }}\n\n{% endif %}"
        "{% endfor %}" + GENERATE + "Assistant:{% endif %}",
        ("<|begin|>", "<|eos|>"), "<|eos|>", ("<|eos|>",),
        (f"<|begin|>User: {ASK}\n\nAssistant:", f" {ANSWER}<|eos|>"),
        bos="<|begin|>", refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "tool call not rendered"},
    ),
    "deepseek v3": Family(
        "{{ bos_token }}" + SYSTEM_FIRST + "{{ system }}{% set ns = namespace(tool=false) %}{% for m in loop_messages %}"
        "{% if m.role == 'user' %}{% set ns.tool = false %}<|User|>{{ m.content }}"
        "{% elif m.tool_calls %}<|Assistant|>{{ m.content }}<|calls|>{% for c in m.tool_calls %}"
        "{{ '<|call|>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' + '<|/call|>' }}{% endfor %}"
        "<|/calls|><|eos|>{% elif m.role == 'tool' %}{% set ns.tool = true %}<|outputs|>{{ m.content }}<|/outputs|>"
        "{% else %}{% if not ns.tool %}<|Assistant|>{% endif %}{{ m.content }}<|eos|>{% set ns.tool = false %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt and not ns.tool %}<|Assistant|>{% endif %}",
        ("<|begin|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|calls|>", "<|/calls|>", "<|call|>", "<|/call|>",
         "<|outputs|>", "<|/outputs|>"), "<|eos|>", ("<|eos|>",),
        (f"<|begin|><|User|>{ASK}<|Assistant|>", f"{ANSWER}<|eos|>"), bos="<|begin|>", refused=NO_REASONING,
    ),
    "deepseek v3.1": Family(
        "{{ bos_token }}" + SYSTEM_FIRST + "{{ system }}{% for m in loop_messages %}{% if m.role == 'user' %}<|User|>"
        "{{ m.content }}{% elif m.role == 'tool' %}<|output|>{{ m.content }}<|/output|>{% else %}"
        "{% if loop.previtem.role == 'user' %}<|Assistant|></think>{% endif %}{{ m.content.split('</think>')[-1] }}"
        "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments + '<|/call|>' }}"
        "{% endfor %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt and loop_messages[-1].role == 'user' %}"
        "<|Assistant|>{{ '<think>' if thinking | default(false) else '</think>' }}{% endif %}",
        ("<|begin|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|call|>", "<|/call|>", "<|sep|>", "<|output|>",
         "<|/output|>"), "<|eos|>", ("<|eos|>",),
        (f"<|begin|><|User|>{ASK}<|Assistant|></think>", f"{ANSWER}<|eos|>"), bos="<|begin|>",
        added=("<think>", "</think>"), refused=NO_REASONING,
    ),
    "deepseek r1": Family(
        "{{ bos_token }}" + SYSTEM_FIRST + "{{ system }}{% for m in loop_messages %}{% if m.role == 'user' %}<|User|>"
        "{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}"
        "{% endfor %}" + GENERATE + "<|Assistant|><think>\n{% endif %}",
        ("<|begin|>", "<|eos|>", "<|User|>", "<|Assistant|>"), "<|eos|>", ("<|eos|>",),
        (f"<|begin|><|User|>{ASK}<|Assistant|>", f"{ANSWER}<|eos|>"), bos="<|begin|>", added=("<think>", "</think>"),
        differs=frozenset({"one", "turns", "system"}),
        refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "tool call not rendered"},
    ),
    "glm4": Family(
        "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
        "{% endfor %}" + GENERATE + "<|assistant|>{% endif %}",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"),
        (f"[gMASK]<sop><|user|>\n{ASK}<|assistant|>", f"\n{ANSWER}<|endoftext|>"), refused=NO_REASONING,
    ),
    "glm4.5": Family(
        "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}" + THOUGHTS + "{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>\n<think>{{ thoughts(m) if loop.index0 > ns.last else '' }}</think>"
        "{% if rest(m) %}{{ '\n' + rest(m) }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>"
        "{% endfor %}\n</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}"
        "\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        + GENERATE + "<|assistant|>{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}"
        "{% endif %}",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"),
        (f"[gMASK]<sop><|user|>\n{ASK}<|assistant|>", f"\n<think></think>\n{ANSWER}<|endoftext|>"),
        added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "gpt-oss": Family(
        "{% macro call(m) %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
        "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% endmacro %}"
        "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
        "{% if messages[0].role in ('developer', 'system') or tools %}<|start|>developer<|message|>"
        "{% if messages[0].role in ('developer', 'system') %}{{ messages[0].content }}{% endif %}"
        "{% for t in tools or [] %}\ntype {{ t.function.name }}{% endfor %}<|end|>{% endif %}"
        "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>"
        "{{ m.content }}<|end|>{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('no call') }}{% endif %}"
        "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}{{ call(m) }}{% elif m.role == 'assistant' %}"
        "{% if m.thinking and loop.last and not add_generation_prompt %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
        + GENERATE + "<|start|>assistant{% endif %}",
        ("<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"),
        (f"<|start|>system<|message|>Current date: 2024-02-03<|end|><|start|>user<|message|>{ASK}<|end|><|start|>assistant",
         f"<|channel|>final<|message|>{ANSWER}<|return|>"),
    ),
    "granite": Family(
        SYSTEM_FIRST + "<|start_of_role|>system<|end_of_role|>{{ system or 'Today: ' + strftime_now('%B %d, %Y') }}"
        "<|end_of_text|>\n{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n"
        "{% endif %}{% for m in loop_messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
        "<|end_of_text|>\n{% endfor %}" + GENERATE + "<|start_of_role|>assistant<|end_of_role|>{% endif %}",
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        "<|end_of_text|>", ("<|end_of_text|>",),
        ("<|start_of_role|>system<|end_of_role|>Today: February 03, 2024<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"
         f"{ASK}<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>", f"{ANSWER}<|end_of_text|>"),
        bos="<|end_of_text|>", refused=NO_REASONING,
    ),
    "smollm2": Family(
        chatml(
            "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        ),
        CHATML, "<|im_end|>", ("<|im_end|>",),
        (f"<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n",
         f"{ANSWER}<|im_end|>"),
        bos="<|im_start|>", refused={**NO_REASONING, **NO_CALLS},
    ),
    "smollm3": Family(
        chatml(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not (enable_thinking | default(true)) %}"
            "<think>\n\n</think>\n{% endif %}{{ m.content.lstrip('\n') }}" + HERMES_CALLS + "<|im_end|>\n",
            "{% if messages[0].role != 'system' %}<|im_start|>system\nToday: {{ strftime_now('%d %B %Y') }}<|im_end|>\n{% endif %}",
            "<|im_start|>assistant\n{% if not (enable_thinking | default(true)) %}<think>\n\n</think>\n{% endif %}",
        ),
        CHATML, "<|im_end|>", ("<|im_end|>",),
        (f"<|im_start|>system\nToday: 03 February 2024<|im_end|>\n<|im_start|>user\n{ASK}<|im_end|>\n"
         "<|im_start|>assistant\n<think>\n\n</think>\n", f"{ANSWER}<|im_end|>"),
        added=("<think>", "</think>"), kwargs={"enable_thinking": False}, refused=NO_REASONING,
    ),
    "lfm2": Family(
        chatml(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<|tool_response|>{{ m.content }}<|/tool_response|>{% else %}"
            "{{ m.content }}{% endif %}<|im_end|>\n",
            "{{ bos_token }}{% if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{% endif %}",
        ),
        (*CHATML, "<|startoftext|>", "<|tool_response|>", "<|/tool_response|>"), "<|im_end|>", ("<|im_end|>",),
        (f"<|startoftext|><|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n", f"{ANSWER}<|im_end|>"),
        bos="<|startoftext|>", refused={**NO_REASONING, **NO_CALLS},
    ),
    "nemotron nano 2": Family(
        SYSTEM_FIRST + "<SPECIAL_10>System\n{{ system }}{% if tools %}{{ tools | tojson }}{% endif %}{{ '\n\n' }}"
        "{% for m in loop_messages %}{% if m.role == 'user' %}<SPECIAL_11>User\n{{ m.content.strip() }}\n"
        "{% elif m.role == 'tool' %}<SPECIAL_11>User\n<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>\n\n{% else %}"
        "<SPECIAL_11>Assistant\n{% if loop.last and not m.tool_calls %}<think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1].strip() }}"
        "{% if m.tool_calls %}<TOOLCALL>[{{ m.tool_calls[0].function | tojson }}]</TOOLCALL>{% endif %}{{ '\n<SPECIAL_12>\n\n' }}"
        "{% endif %}{% endfor %}" + GENERATE + "<SPECIAL_11>Assistant\n<think>\n\n{% endif %}",
        ("<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"), "<SPECIAL_12>",
        ("</s>", "<SPECIAL_11>", "<SPECIAL_12>"),
        (f"<SPECIAL_10>System\n\n\n<SPECIAL_11>User\n{ASK}\n<SPECIAL_11>Assistant\n<think>\n\n",
         f"{ANSWER}\n<SPECIAL_12>"),
        refused=NO_REASONING, differs=frozenset({"tools", "chain"}),
    ),
    "command r": Family(
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ {'user': 'USER', 'assistant': 'CHATBOT', "
        "'system': 'SYSTEM', 'tool': 'SYSTEM'}[m.role] }}_TOKEN|>{% if m.tool_calls %}<|START_ACTION|>"
        "{{ m.tool_calls | map(attribute='function') | list | tojson }}<|END_ACTION|>{% elif m.role == 'assistant' %}"
        "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% else %}{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>"
        "{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",  # always: it knows no generation prompt
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
         "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",),
        (f"<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>{ASK}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
         "<|CHATBOT_TOKEN|>", f"<|START_RESPONSE|>{ANSWER}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        bos="<BOS_TOKEN>", refused=NO_REASONING,
    ),
    "olmo2": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role in ('user', 'system') %}<|{{ m.role }}|>\n{{ m.content }}\n"
        "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{{ eos_token }}{% if not loop.last %}\n{% endif %}"
        "{% endif %}{% endfor %}" + GENERATE + "<|assistant|>\n{% endif %}",
        ("<|endoftext|>",), "<|endoftext|>", ("<|endoftext|>",),
        (f"<|endoftext|><|user|>\n{ASK}\n<|assistant|>\n", f"{ANSWER}<|endoftext|>"),
        bos="<|endoftext|>",
        refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "tool call not rendered"},
    ),
    "kimi k2": Family(
        "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
        "{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You help.<|im_end|>{% endif %}"
        "{% if m.role in ('system', 'tool') %}<|im_system|>{{ m.role }}<|im_middle|>{{ m.content }}"
        "{% elif m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}{% else %}<|im_assistant|>assistant"
        "<|im_middle|>{{ m.content }}{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}<|call|>{{ c.function.name }}"
        "<|argument|>{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}<|/call|>{% endfor %}<|/calls|>{% endif %}{% endif %}<|im_end|>"
        "{% endfor %}" + GENERATE + "<|im_assistant|>assistant<|im_middle|>{% endif %}",
        ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|calls|>",
         "<|/calls|>", "<|call|>", "<|/call|>", "<|argument|>"), "[EOS]", ("<|im_end|>",),
        ("<|im_system|>system<|im_middle|>You help.<|im_end|><|im_user|>user<|im_middle|>"
         f"{ASK}<|im_end|><|im_assistant|>assistant<|im_middle|>", f"{ANSWER}<|im_end|>"),
        bos="[BOS]", refused=NO_REASONING,
    ),
    "minimax m2": Family(
        SYSTEM_FIRST + "]~!b[]~b]system\n{{ system or 'You help.' }}{% if tools %}{{ tools | tojson }}{% endif %}[e~[\n"
        "{% set at = namespace(call=false, last=-1) %}{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{% set at.last = loop.index0 %}{% endif %}{% endfor %}{% for m in loop_messages %}{% if m.role == 'assistant' %}"
        "]~b]ai\n{% if m.reasoning_content and loop.index0 > at.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m.content }}{% if m.tool_calls %}{% set at.call = true %}\n<minimax:tool_call>\n"
        '{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}'
        '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n'
        "{% elif m.role == 'tool' %}{% if not at.call %}{{ raise_exception('no call') }}{% endif %}]~b]tool\n<response>"
        "{{ m.content }}</response>[e~[\n{% else %}]~b]user\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
        + GENERATE + "]~b]ai\n<think>\n{% endif %}",
        ("]~!b[", "]~b]", "[e~["), "[e~[", ("[e~[",),
        (f"]~!b[]~b]system\nYou help.[e~[\n]~b]user\n{ASK}[e~[\n]~b]ai\n", f"{ANSWER}[e~["),
        bos="]~!b[", added=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        differs=frozenset({"one", "turns", "system", "tools", "chain"}),
    ),
    "llama2": Family(
        SYSTEM_FIRST + "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles') }}{% endif %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
        "{% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]"
        "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"), "</s>", ("</s>",), (f"<s>[INST] {ASK} [/INST]", f" {ANSWER} </s>"),
        bos="<s>", refused={**NO_REASONING, "tools": "tool call not rendered", "chain": "chat template"},
    ),
}  # fmt: skip

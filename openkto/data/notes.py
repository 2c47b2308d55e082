"""Notes about rows that are kept, and the sentences in which they are counted and logged."""

from typing import Literal

Note = Literal[
    "wrapped",
    "left plain",
    "already rendered",
    "wrapped twice",
    "repeats the prompt",
    "prefilled",
    "empty think block",
    "reasoning left out",
    "tools left out",
    "arguments left out",
    "developer as system",
    "closed block",
    "thoughts kept",
    "template missing",
    "looks like a chat",
    "foreign markup",
    "asks as a transcript",
    "answers as a transcript",
    "carriage returns",
    "foreign end",
]

# What is worth a warning is so because training continues with something that inference is unlikely to see.
WARNINGS: dict[str, str] = {
    "left plain": "the prompt is a plain text and stays one although the tokenizer has a chat template, so the model is"
    " not trained on what it sees in a chat; --apply_chat_template wraps such prompts",
    "template missing": "the prompt is a plain text and stays one: the tokenizer seems to be a chat model's, and has no"
    " chat template. Put the model's chat_template.jinja into its folder, or write its turns with"
    " --input_template; --apply_chat_template false says that plain texts are meant",
    "looks like a chat": "the prompt looks like a chat, and no chat template is applied: give messages, or pass"
    " --apply_chat_template for prompts of one turn",
    "foreign markup": "the prompt holds the markup of a chat template that is not this tokenizer's, which it reads as"
    " plain text; give messages in its place",
    "asks as a transcript": "the prompt ends with the mark of the next speaker (Assistant:), and all of it goes into"
    " one user message; give messages in its place",
    "answers as a transcript": "the completion begins with the mark of a speaker (Assistant: or User:), which the model"
    " learns to write; leave it out",
    "carriage returns": "the completion holds Windows' line ends (\\r\\n), which the model learns to write; write \\n",
    "foreign end": "the completion holds the markup of a chat template that is not this tokenizer's (<|im_end|> or the"
    " like), which it reads as plain text and the model learns to write; leave it out",
    "wrapped twice": "the prompt already holds the chat template's markup and was wrapped in it again, as"
    " --apply_chat_template asks; leave the flag out to take such prompts as they are",
    "tools left out": "the chat template does not render the field tools: the model sees no description of them, here"
    " and at inference",
    "arguments left out": "the chat template does not render all arguments of the tool calls, so the model learns calls"
    " without them",
    "repeats the prompt": "the completion begins with its own prompt, which is then there twice and scored; leave the"
    " prompt out of the completion",
    "empty think block": "the chat template puts an empty think block before the answer, which is scored; where the"
    " model is used without thinking pass --chat_template_kwargs '{\"enable_thinking\": false}', or what the template"
    " calls it, so that the block belongs to the prompt",
}
INFORMATION: dict[str, str] = {
    "wrapped": "the prompt is a plain text and goes through the chat template (--apply_chat_template false: as it is)",
    "already rendered": "the prompt already holds the chat template's markup and is taken as it is",
    "prefilled": "the prompt ends with the beginning of the answer, which the completion continues",
    "reasoning left out": "the chat template leaves out the reasoning of earlier turns, as it does at inference",
    "closed block": "the chat template leaves out what the generation prompt opens and closes (an empty think block)"
    " once the answer follows; it stays in the prompt, as at inference",
    "thoughts kept": "the chat template takes the thoughts out of the answer although generation begins with them; they"
    " are kept, as the model writes them",
    "developer as system": "the chat template knows no developer role: its message goes as the system's",
}

# What the tokenizer and the template did to rows.
MERGED = "the tokenizer merges over the boundary, so the completion is tokenised by itself"
TEMPLATE_DIFFERS = (
    "the chat template renders the prompt otherwise when the answer follows; the common text is the prompt"
)
SPECIAL_MARKUP = "a text holds the markup of a special token, which becomes that token"

"""Make the tiny model of this example: that of reverse_text, with a chat template that knows tools.

python examples/calculator/make_model.py models/calculator
"""

import runpy
import sys
from pathlib import Path

BASE = runpy.run_path(str(Path(__file__).parents[1] / "reverse_text" / "make_model.py"))
# A call is two of these tokens with an expression between them, so that few tokens have to be learned.
CALL_BEGIN = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}\n</tool_call>'
WORDS = [*BASE["ROLES"], "tool", "calculator", CALL_BEGIN, CALL_END]

# Of a tool, only its name is shown.
CHAT_TEMPLATE = """\
{%- for tool in tools or [] %}
{{- '<|im_start|>system\\n' + tool.function.name + '<|im_end|>\\n' }}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main(target: Path) -> None:
    BASE["write_files"](target, BASE["make_tokenizer"](WORDS), CHAT_TEMPLATE)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))

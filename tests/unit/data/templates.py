"""Chat templates of the kinds that models come with: plain, with tools, that rewrite earlier turns, that mark turns."""

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Tools in the system message, calls as JSON between tags, results of several calls in one turn of the user.
# What the assistant thought is shown after the last question only; its last turn has always room for it.
THINKING_WITH_TOOLS = """\
{%- set state = namespace(last_question=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set state.last_question = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
    {%- for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.last_question and (loop.last or message.reasoning_content) %}
            {{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.strip() }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Roles must take turns, content is trimmed, and there is no generation prompt.
STRICT = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content.strip() + ' [/INST]' }}
    {%- else %}{{ ' ' + message.content.strip() + '<|im_end|>' }}{% endif %}
{%- endfor %}"""

# The generation prompt says more than is shown of a turn later.
PROMPTS_TO_THINK = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<User>' + message.content }}
    {%- else %}{{ '<Assistant>' + message.content.split('</think>')[-1] + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"""

# Mistral's: the system message stands in the last message, if a user wrote it.
SYSTEM_LAST = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' }}
    {%- else %}{{ ' ' + message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}"""

MARKED = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{ message.content }}
        {%- for call in message.tool_calls or [] %}{{ '\n' + call.function | tojson }}{% endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A count at the beginning: no rendered beginning of a conversation is the beginning of the whole.
COUNTED = "{{ messages|length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"

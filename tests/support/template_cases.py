# ruff: noqa: E501  (templates are one line, as in the files they come from)
"""Chat templates of many kinds and conversations that try them. `make.py` runs all of them through transformers."""

TEMPLATES = {
    # As in the models' own files.
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "qwen2.5": '{%- if tools %}\n    {{- \'<|im_start|>system\\n\' }}\n    {%- if messages[0][\'role\'] == \'system\' %}\n        {{- messages[0][\'content\'] }}\n    {%- else %}\n        {{- \'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\' }}\n    {%- endif %}\n    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}\n    {%- for tool in tools %}\n        {{- "\\n" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}}\\n</tool_call><|im_end|>\\n" }}\n{%- else %}\n    {%- if messages[0][\'role\'] == \'system\' %}\n        {{- \'<|im_start|>system\\n\' + messages[0][\'content\'] + \'<|im_end|>\\n\' }}\n    {%- else %}\n        {{- \'<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n\' }}\n    {%- endif %}\n{%- endif %}\n{%- for message in messages %}\n    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}\n        {{- \'<|im_start|>\' + message.role + \'\\n\' + message.content + \'<|im_end|>\' + \'\\n\' }}\n    {%- elif message.role == "assistant" %}\n        {{- \'<|im_start|>\' + message.role }}\n        {%- if message.content %}\n            {{- \'\\n\' + message.content }}\n        {%- endif %}\n        {%- for tool_call in message.tool_calls %}\n            {%- if tool_call.function is defined %}\n                {%- set tool_call = tool_call.function %}\n            {%- endif %}\n            {{- \'\\n<tool_call>\\n{"name": "\' }}\n            {{- tool_call.name }}\n            {{- \'", "arguments": \' }}\n            {{- tool_call.arguments | tojson }}\n            {{- \'}\\n</tool_call>\' }}\n        {%- endfor %}\n        {{- \'<|im_end|>\\n\' }}\n    {%- elif message.role == "tool" %}\n        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}\n            {{- \'<|im_start|>user\' }}\n        {%- endif %}\n        {{- \'\\n<tool_response>\\n\' }}\n        {{- message.content }}\n        {{- \'\\n</tool_response>\' }}\n        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}\n            {{- \'<|im_end|>\\n\' }}\n        {%- endif %}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- \'<|im_start|>assistant\\n\' }}\n{%- endif %}\n',
    # Written for these tests, in the style of well-known models.
    "llama3": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "strict": """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/…') }}
    {% endif %}
    {% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{% endfor %}""",
    "parts": """{% for message in messages %}<|{{ message.role }}|>
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}

{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "controls": """{%- macro show(message) -%}{{ message.role | upper }}: {{ message.get('content', '-') | default('-', true) }}{%- endmacro -%}
{%- set ns = namespace(count=0, last='') -%}
{%- for message in messages -%}
  {%- if message.role == 'system' %}{% continue %}{% endif -%}
  {%- if ns.count >= 3 %}{% break %}{% endif -%}
  {%- set ns.count = ns.count + 1 -%}
  {%- set ns.last = message.role -%}
  {%- generation %}{{ show(message) }}|{% endgeneration -%}
{%- endfor -%}
{{ ns.count }} {{ ns.last }} {{ strftime_now('at') }} {{ dict(a=1, b=[2]) | tojson }} {{ messages | length }}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif -%}
{%- for d in documents or [] %}[{{ d.title }}]{% endfor -%}
{%- if messages[-1].reasoning_content %}{{ messages[-1].reasoning_content }}{{ messages[-1].thinking }}{% endif -%}""",
    "loops": """{%- for m in messages | rejectattr('role', 'equalto', 'system') -%}
{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}{{ loop.previtem.role if loop.previtem }}{{ loop.revindex0 }}
{%- for key, value in m.items() if value is string %}{{ key ~ '=' ~ value ~ loop.index0 ~ nothing }};{% else %}-{% endfor -%}
{%- else -%}none{%- endfor -%}
{%- for item in [[1, [2, 3]], [4]] recursive %}({% if item is iterable %}{{ loop(item) }}{% else %}{{ item }}{% endif %}{{ loop.depth }}){% endfor -%}
{%- for a, b in {'x': 1, 'y': 2} | dictsort %}{{ a }}{{ b }}{{ loop.cycle('p', 'q') }}{% endfor -%}
{%- for nobody in missing %}?{% endfor -%}{{ 'ab' * 2 + 'c' }}{{ 2 ** 3 * 2 + 1 }}{{ [1] + [2] }}""",
    "tojson": "{{ messages | tojson }}{{ tools | tojson(ensure_ascii=True, sort_keys=True) }}{{ {'k': '<é&>'} | tojson(separators=(',', ':')) }}",
    "broken": "{% for message in messages %}{{ message.content }}",
    "undefined": "{{ nothing.at.all }}",
    "escape": "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
    "mutating": "{{ messages.append({'role': 'x'}) }}",
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für «Städte» 天気 <b>&amp;</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}}}

CASES = {
    "one": {"messages": [{"role": "user", "content": "Hi there"}]},
    "no_prompt": {"messages": [{"role": "user", "content": "Hi"}], "options": {"add_generation_prompt": False}},
    "system": {"messages": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Wie geht's? 天気 👩‍👩‍👧"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b <&> \"q\" {{ no }} {% no %}"},
            {"role": "user", "content": "  c  "},
        ]
    },
    "wrong_order": {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
    "tools": {"messages": [{"role": "user", "content": "Weather?"}], "options": {"tools": TOOLS}},
    "tool_call": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "content": "17 °C"},
            {"role": "tool", "name": "weather", "content": "18 °C"},
        ],
        "options": {"tools": TOOLS},
    },
    "null_content": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "17 °C"},
        ],
        "options": {"tools": TOOLS},
    },
    "two_calls": {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]}],
    },
    "null_calls": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": None}]},
    "list_content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
    "variables": {
        "messages": [{"role": "user", "content": "x"}],
        "options": {"enable_thinking": False, "date_string": "1 Jan 2030", "documents": [{"title": "T", "text": "U"}]},
    },
    "reasoning": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "reasoning": "because"}]},
    "continue": {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is "}],
        "options": {"continue_final_message": True, "add_generation_prompt": False},
    },
    "empty_text": {"messages": [{"role": "user", "content": ""}]},
    "extra_role": {"messages": [{"role": "user", "content": "x"}, {"role": "critic", "content": "y", "mood": "grim"}]},
}

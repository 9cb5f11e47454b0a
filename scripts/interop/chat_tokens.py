#!/usr/bin/env python3
"""Writes conversations as tokens and masks for mantissa, with the tokenizer and the chat template of any model of transformers.

    .venv-interop/bin/python scripts/interop/chat_tokens.py MODEL IN.jsonl OUT.jsonl [--template-arguments '{"date_string": "26 Jul 2024"}']

MODEL is a folder. A line of IN is {"messages": [...]}, perhaps with "tools", as apply_chat_template() takes them; one of OUT {"tokens": [...], "mask":
[...]}. The mask is 1 for what the assistant writes: where the template marks that ({% generation %}), what it marks; else, of each of its turns, what
follows the prompt that asks for it, to the first end token (those of tokenizer and generation_config.json), or to what another turn would change. Ends
with code 4 at a line that is no conversation, or whose turns the template renders otherwise later than when they are asked for.
"""
import argparse
import json
import os
import re
import sys
from pathlib import Path

import transformers


class BadLine(Exception):
    """An error in a line."""


class Renderer:
    def __init__(self, folder, arguments):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.arguments = arguments
        template = self.tokenizer.chat_template
        if not isinstance(template, str):
            sys.exit(f"chat_tokens: {folder} has {'several chat templates' if template else 'no chat template'}")
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        self.ends = set(end_tokens(Path(folder), self.tokenizer))

    def text(self, messages, tools, ask=False):
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask, **self.arguments)
        except Exception as error:  # an error of the template
            raise BadLine(f"the template raised an exception: {error}") from error

    def tokens_and_mask(self, messages, tools):
        if self.marked:
            marked = self.tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **self.arguments)
            return list(marked["input_ids"]), list(marked["assistant_masks"])
        text = self.text(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        mask, turns = [0] * len(ids), [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        begins = [self.begin(text, messages[:turn], tools) for turn in turns] + [len(text)]
        for i, turn in enumerate(turns):
            own = [at for at, (start, _) in enumerate(places) if begins[i] <= start < begins[i + 1]]
            ends = [at for at in own if ids[at] in self.ends]
            if ends:
                own = [at for at in own if at <= ends[0]]
            elif turn + 1 < len(messages):
                same = self.unchanged(text, messages[:turn], messages[turn], tools)
                own = [at for at in own if places[at][1] <= same]
            for at in own:
                mask[at] = 1
        return ids, mask

    def begin(self, text, before, tools):
        """The position at which the answer to these messages begins."""
        if not before:
            return self.begin_of_first(text, tools)
        prompt = self.text(before, tools, ask=True)
        if not text.startswith(prompt):
            raise BadLine(f"messages[{len(before)}]: the template renders what precedes it otherwise than when it is asked for")
        return len(prompt)

    def begin_of_first(self, text, tools):
        """The position of an answer that no message precedes: transformers renders no empty conversation, so the prompt for an answer is
        taken from another one."""
        other = [{"role": "user", "content": "Hi"}]
        shown, asked = self.text(other, tools), self.text(other, tools, ask=True)
        header = asked.removeprefix(shown)
        if header in ("", asked) or header not in text:
            raise BadLine("messages[0]: begins with the assistant, and the template does not show where its answer begins")
        return text.index(header) + len(header)

    def unchanged(self, text, before, turn, tools):
        """The length of the text that would be the same if the turn were the last one, which may show reasoning that earlier ones do
        not."""
        bare = {key: value for key, value in turn.items() if key not in ("thinking", "reasoning_content")}
        return max(len(os.path.commonprefix([text, self.text([*before, last], tools)])) for last in (turn, bare))


def end_tokens(folder, tokenizer):
    config = folder / "generation_config.json"
    ids = json.loads(config.read_text()).get("eos_token_id") if config.exists() else None
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}


def rendered(renderer, line):
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadLine(error) from error
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise BadLine("messages: must be a list of objects with a role")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadLine("messages: has no message of the assistant, so there is nothing to learn")
    ids, mask = renderer.tokens_and_mask(messages, record.get("tools") or None)
    if not any(mask[1:]):
        raise BadLine("messages: nothing of the assistant is left in what the template renders")
    return {"tokens": ids, "mask": mask}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model, or of its tokenizer alone")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--template-arguments", type=json.loads, default={}, help="variables of the template, as a JSON object")
    args = parser.parse_args()
    renderer = Renderer(args.model, args.template_arguments)
    partial, examples, trained = args.output.with_name(args.output.name + ".tmp"), 0, 0
    with args.input.open(encoding="utf-8") as lines, partial.open("w") as out:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = rendered(renderer, line)
            except BadLine as problem:
                partial.unlink()
                print(f"chat_tokens: {args.input}, line {number}: {problem}", file=sys.stderr)
                sys.exit(4)
            out.write(json.dumps(record, separators=(",", ":")) + "\n")
            examples, trained = examples + 1, trained + sum(record["mask"])
    partial.rename(args.output)
    print(f"{args.output}: {examples} examples, {trained} trained tokens")


if __name__ == "__main__":
    main()

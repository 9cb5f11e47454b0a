"""Counts the instructions of a kernel's machine code along the path that most elements take.

A kernel is a graph of blocks of instructions. Its passes are the innermost loops that move data, and the way past these loops. Of a pass
the path counts that does most work and, of those, has fewest instructions: work are bytes of wide accesses of global memory, so the
path is that of aligned rows, and of numbers that are no NaN; or products of tensor cores.
"""
import collections
import re
import subprocess

Instruction = collections.namedtuple("Instruction", "address guarded opcode operands")
Cost = collections.namedtuple("Cost", "work instructions path")  # path: the number of a block, and the path behind it
Code = collections.namedtuple("Code", "instructions registers shared threads")  # shared: bytes without those that a launch asks for


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def readable(symbols):
    """Names without namespaces and arguments: norm_backward<false, 3u, bf16>."""
    names = subprocess.run(["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True).stdout.splitlines()
    formats = {"Element<4, 3, 126u>": "E4M3", "Element<5, 2, 123u>": "E5M2", "Element<2, 1, 7u>": "E2M1"}
    names = [re.sub("|".join(formats), lambda found: formats[found[0]], name) for name in names]
    return [re.sub(r"^void |\(anonymous namespace\)::|mantissa::|gpu::", "", name).split("(")[0] for name in names]


def kernels(path, architecture):
    """The Code of each kernel of an object, by its readable name."""
    found = {}
    usage = output("cuobjdump", "-arch", architecture, "--dump-resource-usage", path)
    resources = {name: (int(registers), int(shared)) for name, registers, shared in re.findall(r"Function (\S+):\s+REG:(\d+).*?SHARED:(\d+)", usage)}
    elf = output("cuobjdump", "-arch", architecture, "-elf", path)
    threads = {name: int(count, 16) for name, count in re.findall(r"^\.nv\.info\.(\S+)$(?:.|\n)*?MAX_THREADS\n.*\n\s*Value:\s*(0x\w+)", elf, re.M)}
    texts = output("cuobjdump", "-arch", architecture, "-sass", path).split("Function : ")[1:]
    symbols = [text.split(None, 1)[0] for text in texts]
    for symbol, name, text in zip(symbols, readable(symbols), texts):
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(@!?\w+ +)?([A-Z][A-Z0-9_.]*) *(.*?) *;", text)
        found[name] = Code([Instruction(int(at, 16), bool(guard), *rest) for at, guard, *rest in lines], *resources[symbol], threads[symbol])
    return found


def toolkit(path, architecture):
    return re.search(r"release ([0-9.]+)", output("cuobjdump", "-arch", architecture, "-elf", path))[1]


def bytes_of(instruction):
    """Bytes that a thread's access of global or shared memory moves; 0 of another instruction."""
    if not re.match(r"(LDG|STG|LDS|STS)\b", instruction.opcode):
        return 0
    width = re.search(r"\.[US]?(8|16|64|128)\b", instruction.opcode)
    return int(width[1]) // 8 if width else 4


def work_of_bytes(instruction):
    """The work of a path: its bytes, and of those wide accesses first."""
    size = bytes_of(instruction)
    least = 16 if instruction.opcode[2] == "S" else 8 if instruction.opcode.startswith("LDG") else 4
    return size * size if size >= least else 0


def is_product(instruction):
    return int(instruction.opcode.startswith("HMMA"))


def widest(path, opcode):
    """Bytes of the widest accesses of an opcode, of one and of all."""
    moved = [bytes_of(each) for each in path if re.match(opcode, each.opcode)]
    size = max(moved, default=0)
    return size, size * moved.count(size)


def bytes_in_flight(path):
    """The most bytes of a thread's loads that are under way when one of them is first read."""
    under_way, most = [], 0  # pairs of bytes and registers, in the order of the loads
    for each in path:
        operands = each.operands.split(",", 1)
        read = each.operands if each.opcode.startswith("ST") else operands[-1]
        registers = {int(number) for number in re.findall(r"\bR(\d+)", read)}
        waited = [at for at, (_, loaded) in enumerate(under_way) if loaded & registers]
        if waited:
            most = max(most, sum(number for number, _ in under_way))
            under_way = under_way[waited[-1] + 1 :]
        if each.opcode.startswith("LDG") and (into := re.match(r"R(\d+)", operands[0])) and (size := bytes_of(each)):
            under_way.append((size, set(range(int(into[1]), int(into[1]) + (size + 3) // 4))))
    return most


class Graph:
    """Blocks of a function, and which follow which."""

    def __init__(self, instructions, work):
        self.instructions, self.work = instructions, work
        at = {each.address: i for i, each in enumerate(instructions)}
        ends = re.compile(r"(BRA|EXIT|RET)\b")
        targets = {i: at[int(each.operands.split()[-1], 16)] for i, each in enumerate(instructions) if re.match(r"(BRA|CALL\.REL)\b", each.opcode)}
        behind_ends = {i + 1 for i, each in enumerate(instructions) if ends.match(each.opcode)}
        leaders = sorted({0, *targets.values(), *behind_ends} - {len(instructions)})
        self.blocks = [range(first, end) for first, end in zip(leaders, [*leaders[1:], len(instructions)])]
        block_at = {block[0]: number for number, block in enumerate(self.blocks)}
        self.next = []
        for number, block in enumerate(self.blocks):
            last = instructions[block[-1]]
            conditional = last.guarded or "," in last.operands or last.opcode.startswith("BRA.DIV")
            follows = [number + 1] if number + 1 < len(self.blocks) and (conditional or not ends.match(last.opcode)) else []
            if last.opcode.startswith("BRA"):
                follows.append(block_at[targets[block[-1]]])
            self.next.append(follows)
        self.calls = {i: block_at[target] for i, target in targets.items() if instructions[i].opcode.startswith("CALL")}
        self.order = self.reachable_in_order(0)
        self.back = self.back_edges()

    def reachable_in_order(self, first):
        """Blocks behind `first`, each behind all that lead to it but by a loop."""
        seen, order, stack = {first}, [], [(first, iter(self.next[first]))]
        while stack:
            number, follows = stack[-1]
            for each in follows:
                if each not in seen:
                    seen.add(each)
                    stack.append((each, iter(self.next[each])))
                    break
            else:
                order.append(number)
                stack.pop()
        return order[::-1]

    def back_edges(self):
        """Pairs of blocks of which the second begins a loop and the first ends it."""
        place = {number: i for i, number in enumerate(self.order)}
        return {(number, each) for number in self.order for each in self.next[number] if place[each] <= place[number]}

    def loops(self):
        """Sets of blocks, by the first of them."""
        before = collections.defaultdict(set)
        for number in self.order:
            for each in self.next[number]:
                before[each].add(number)
        found = {}
        for last, first in self.back:
            body, left = found.setdefault(first, {first}), [last]
            while left:
                number = left.pop()
                if number not in body:
                    body.add(number)
                    left += before[number]
        return found

    def best_path(self, first, inside):
        """The Cost of going from the block `first` through those of `inside` back to it, or to the end of the kernel."""
        best = {}
        for number in [each for each in reversed(self.reachable_in_order(first)) if each in inside]:
            own = self.blocks[number]
            called = sum(self.length_of_call(self.calls[i]) for i in own if i in self.calls)
            rest = [best[each] for each in self.next[number] if each in best and (number, each) not in self.back]
            if not self.next[number] or (number, first) in self.back:
                rest.append(Cost(0, 0, ()))
            if rest:
                then = max(rest, key=lambda cost: (cost.work, -cost.instructions))
                work = sum(self.work(self.instructions[i]) for i in own)
                best[number] = Cost(work + then.work, len(own) + called + then.instructions, (number, then.path))
        return best.get(first)

    def length_of_call(self, first):
        """The fewest instructions of a function within the kernel."""
        lengths = {}
        for number in reversed(self.reachable_in_order(first)):
            lengths[number] = len(self.blocks[number]) + min((lengths[each] for each in self.next[number] if each in lengths), default=0)
        return lengths[first]

    def passes(self):
        """Pairs of the number of instructions and those in sight, which called functions are not."""
        works = lambda body: any(self.work(self.instructions[i]) for number in body for i in self.blocks[number])
        loops = {first: body for first, body in self.loops().items() if works(body)}
        innermost = {first: body for first, body in loops.items() if not any(each != first and each in body for each in loops)}
        found = []
        past = set(self.order).difference(*innermost.values())
        for first, inside in [*innermost.items(), *([(0, past)] if 0 in past else [])]:
            if (cost := self.best_path(first, inside)) and cost.work:
                path, rest = [], cost.path
                while rest:
                    path += [self.instructions[i] for i in self.blocks[rest[0]]]
                    rest = rest[1]
                found.append((cost.instructions, path))
        return found

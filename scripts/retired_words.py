"""Words for which the field has others. check.py finds them in names, messages, comments and documents."""
import re

SPEAK_OF_RETIRED_WORDS = {"check_house_test.py", "retired_words.py"}
OLD_KEYS = r"^((load_config|run_config_test)\.cpp)$"  # where old keys are refused, and said to be


def word(pattern, advice, allowed=None):
    return re.compile(pattern), advice, re.compile(allowed) if allowed else None


# Pattern, the word to use instead, the names of files that may have it.
RETIRED = [
    word(r"(?i:quant|initial|normal|synchron|token|vector|recogn|random|optim|serial)is(?:e[drs]?|ing|ation)(?![a-z])", "it with z", OLD_KEYS),
    word(r"(?i:colour|neighbour|honour|behaviour|favour)", "it with or"),
    word(r"(?i:labelled|cancelled|signalled|modelled|licence|centred|centre|artefact|judgement)", "it as in American"),
    word(r"\b[mM]atrix products\b|\bmatrix product\b|\b(?:Packed|Linear|Tiled|Block)Product|\b(?!native_products\b)\w+_products\b", "GEMM or matmul"),
    word(r"\brule\.choices\b|score_after_choice", "top_k, assignments", OLD_KEYS),
    word(r"[jJ]ourney", "AllToAllPlan"),
    word(r"ops/place\.h|\bSplit::(?:rows|columns)\b", "TensorParallel, column- or row-parallel"),
    word(r"\bgather_texts\b|\btext_of_first\b|\btexts_at_first\b", "all_gather_strings, broadcast_string, gather_strings"),
    word(r"\bTextsConfig\b|\bTextEvent\b|\bwrite_texts\b|\b[wW]ritten texts\b", "samples"),
    word(r"\b(?:of|are) texts\b", "strings, text files"),
    word(r"\b(?:tell|told)_\w*|::tell\(|\btells =", "report, announce"),
    word(r"\bits_choices\b", "assignments"),
    word(r"\brows (?:that )?travel\b", "permuted tokens are dispatched"),
    word(r"OperandSource::shifted|\bshifts_output_grad\b", "requantized"),
    word(r"\b[bB]ands?\b|_bands?\b", "row block or column block"),
    word(r"\bconst Part&|\bvector<Part>|\bwhole_parts\b", "ParameterShard"),
    word(r"\b[sS]labs?\b(?! 7)|_slabs?\b|\bkSlab", "chunk"),
    word(r"\b[bB]orders\b(?!-)|\bBorder\b", "boundary"),
    word(r"\bstruct Gate\b|\bbehind_gate\b|\bstand_behind\b", "ReadyEvent"),
    word(r"\blaggard", "slowest rank"),
    word(r"\b[mM]eetings?\b|\bmeeting_\w+|_meetings?\b", "rendezvous"),
    word(r"\b[sS]trangers?\b", "unauthenticated connection"),
    word(r"\bproof_of\b|\bsame_proof\b|\bkProofBytes\b|\bProver\b", "MAC"),
    word(r"MANTISSA_TOKEN|\bjob_token\b", "secret"),
    word(r"\b[pP]atience\b|\boverdue\b", "watchdog, timeout"),
    word(r"\bk?Famil(?:y|ies)[A-Z]?\w*|\bfamily_\w+|\b(?:of|no|its) family\b", "architecture"),
    word(r"\b[cC]arriedFiles?\b|\bcarried_files\b|\bcarried files\b", "tokenizer files"),
    word(r"\b[rR]outingTally\b|\b[tT]ally\b", "router statistics"),
    word(r"\bodd_items\b|\b(?:odd|usual) (?:rank|item|value)\b|\bauto odd\b|\busual_value\b", "mismatching, majority"),
    word(r"\bleads\(\)", "is_rank0()"),
    word(r"[.>]doing\b", "set_phase"),
    word(r"\bowes_\w+", "pending_evaluation, pending_samples"),
    word(r"\bstack_of\b|\bstacked_bias_of\b|\b[sS]tacks? of (?:experts|matrices)\b", "grouped weight"),
    word(r"[fF]arewell|\b[bB]arren\b|\bblamers?\b", "what it does"),
]

"""Malformed command lines and environment variables."""

import shlex

from core.malformed.case import Case, CommandError, attend, command, made, refused, under
from helpers.result_files import FOLDER

CPU, KERNELS = (shlex.quote(str(FOLDER / name)) for name in ("cpu-intel-xeon-avx2.json", "kernels.json"))
_WINDOW = '{"branches":[{"kind":"sliding_window","window":4}]}'

COMMANDS = {
    "no names of backends": Case(under(attend(), DILKIT_BACKEND=","), ValueError, "DILKIT_BACKEND=','", "empty name"),
    "an unknown backend": Case(under(attend(), DILKIT_BACKEND="NaN"), ValueError, "DILKIT_BACKEND='NaN'", "known: "),
    "a command with an unknown backend": refused("verify", "DILKIT_BACKEND='no'", "known: ", DILKIT_BACKEND="no"),
    "a command with bytes in letters": refused("verify --backend reference", "DILKIT_CACHE_BYTES='x'", DILKIT_CACHE_BYTES="x"),
    "no such command": Case(made(command, "infos"), CommandError, "dilkit: ", "infos", "info", "verify"),
    "no such command's help": Case(made(command, "infos --help"), CommandError, "dilkit: ", "infos", "info", "verify"),
    "no such GPU": refused("info --assume gtx", "--assume", "'gtx'", "sm_61"),
    "no such device": refused("info --device tpu", "--device", "'tpu'", "cuda"),
    "seq of zero": refused("info --seq 0", "--seq", "'0'", "1 or more"),
    "segments": refused("info --segments 4,,8", "--segments", "''", "whole number"),
    "rates": refused("info --segments 4,8 --rates 1", "--segments", "--rates", "one rate"),
    "offset": refused("draw --pattern \"Pattern([4],[1],'x')\"", "--pattern", "'x'", "modulo"),
    "two devices": refused("info --device cpu --assume sm_61", "--assume", "--device"),
    "a GPU that is not here": refused("verify --device cuda:99", "--device", "'cuda:99'", "not there"),
    "rates beside a pattern": refused("draw --pattern 'Pattern([4], [1])' --rates 2", "--rates", "--pattern"),
    "segments beside a pattern": refused(f"draw --pattern '{_WINDOW}' --segments 4", "not allowed with argument", "--pattern"),
    "a pattern nowhere": refused("draw --pattern nowhere.json", "--pattern", "'nowhere.json'", "JSON"),
    "a pattern of nothing": refused("info --pattern '{\"branches\":[]}'", "--pattern", "branches is empty"),
    "a ring for a window": refused("plan --seq 64 --pattern 'SlidingWindow(4)' --schedule ring", "schedule='ring'", "'auto'"),
    "a benchmark of half a grid": refused("bench --seq 64 --pattern 'Neighborhood(128, 3)'", "seq=64", "128 tokens"),
    "what is kept of a neighborhood": refused("draw --kept --seq 8 --pattern 'Neighborhood(8, 3)'", "Neighborhood", "growing"),
    "a pattern of nothing known": refused("bench --pattern 'Nothing(4)'", "'Nothing'", "longformer", "SlidingWindow"),
    "rates without segments": refused("plan --rates 1,2", "--rates", "without --segments"),
    "ranks without tokens": refused("plan --seq 2 --ranks 3", "--ranks", "3 ranks", "--seq 2"),
    "bandwidth": refused("plan --bandwidth 5apples", "--bandwidth", "'5apples'", "50GB/s"),
    "bandwidth in small letters": refused("plan --bandwidth 50mb/s", "--bandwidth", "'50mb/s'", "50GB/s"),
    "shape of 4 sides": refused("order --shape 2x2x2x2", "--shape", "4 sides", "1, 2 or 3"),
    "shape of a letter": refused("order --shape 4x", "--shape", "'4x'", "64x64"),
    "shape beyond memory": refused("order --shape 1e9x1e9", "--shape", "at most 16,777,216"),
    "window": refused("order --window 2", "window=2", "even", "1 or 3"),
    "png of a gif": refused("order --png x.gif", "--png", "'x.gif'", ".png"),
    "resume of no suite": refused("bench --resume", "--resume", "--suite"),
    "length of a suite": refused("bench --suite cpu --seq 5", "--seq", "--suite cpu"),
    "no file": refused("report none.json", "none.json", "does not exist"),
    "a device as a file": refused("report /dev/zero", "/dev/zero", "no regular file"),
    "a device to compare": refused(f"compare /dev/zero {CPU}", "/dev/zero", "no regular file"),
    "margin": refused(f"compare {CPU} {CPU} --margin nan", "--margin", "'nan'", "0 to 10"),
    "results of two kinds": refused(f"compare {CPU} {KERNELS}", "kernels.json", "nothing in it can be compared"),
    "show and take": refused("tune --show --take x", "--take", "--show"),
    "a long picture": refused("draw --seq 100000", "--seq", "100000", "at most 2048"),
    "minutes": refused("demo --minutes 0", "--minutes", "'0'", "above 0"),
    "context": refused("demo --context 1", "--context", "'1'", "64 or more"),
    "temperature": refused("demo --sample x --temperature nan", "--temperature", "'nan' is not a number of 0 or more"),
    "bytes of no sample": refused("demo --bytes 3", "--bytes", "no meaning", "text"),
}

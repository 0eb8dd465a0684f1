"""Published measurements of training jobs: models, machines, the configuration of each job, and its throughput.

Each table names its source. A choice that the source does not state is None: the planner then takes the shortest way.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Model:
    """A decoder, and the flags of chevron-plan model for it."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    flags: tuple = ("--kind", "gpt", "--tied", "--dtype", "fp16", "--kernels", "fused")
    attention: str = "full"

    def arguments(self, attention=None):
        sizes = dict(
            layers=self.layers, width=self.width, heads=self.heads, vocabulary=self.vocabulary, tokens=self.tokens
        )
        return [
            *self.flags,
            "--masters",
            "--attention",
            attention or self.attention,
            *(word for flag, value in sizes.items() for word in (f"--{flag}", str(value))),
        ]


@dataclass(frozen=True)
class Machine:
    """Nodes of eight GPUs; rates of one GPU in one direction."""

    gpu: str
    memory: str
    inside: str
    between: str
    flags: tuple = ()  # of chevron-plan model

    @property
    def bytes(self):
        """The memory of a GPU."""
        unit = 1 << 30 if self.memory.endswith("GiB") else 10**9
        return int(self.memory.removesuffix("GiB").removesuffix("GB")) * unit


@dataclass(frozen=True)
class Row:
    """One measured job. `published` is in the unit of its table."""

    model: Model
    gpus: int
    ranks: int
    shards: int
    batch: int  # sequences of a step, over all replicas
    published: float
    samples: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    even: bool = (
        True  # as many layers on each stage; False: one fewer on the first stage and on the last; None: not stated
    )
    recompute: bool = True
    sharded: bool = False  # the optimizer's state, over replicas
    attention: str | None = None
    note: str = ""  # a column of the table
    memory: float | None = None  # published bytes of the fullest rank, in the unit of the table
    post_validated: bool = False  # steps overlap

    @property
    def replicas(self):
        return self.gpus // (self.ranks * self.shards)

    def layers(self, chunks):
        """Numbers of layers of the stages; nothing where they are not stated or do not exist."""
        stages = self.ranks * chunks
        if self.even is None:
            return None
        whole = self.model.layers + (0 if self.even else 2)
        if whole % stages:
            return None
        out = [whole // stages] * stages
        if not self.even:
            out[0] -= 1
            out[-1] -= 1
        return out


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    source: str
    machine: Machine
    unit: str
    note: str  # heading of the column of notes; empty: none
    rows: tuple
    memory_unit: str = ""  # of published bytes; empty: none are published

    def figure(self, row, milliseconds):
        """The figure that the source publishes, of a step of so many milliseconds."""
        seconds, m = milliseconds / 1e3, row.model
        if self.unit == "s per step":
            return seconds
        if self.unit == "TFLOP/s per GPU":  # Narayanan et al., equation 3, which counts a fourth forward
            operations = 96 * row.batch * m.tokens * m.layers * m.width**2
            operations *= 1 + m.tokens / (6 * m.width) + m.vocabulary / (16 * m.layers * m.width)
            return operations / row.gpus / seconds / 1e12
        return row.batch * (1 if self.unit == "samples/s per GPU" else m.tokens) / row.gpus / seconds

    def deviation(self, row, milliseconds):
        """Predicted over published throughput, less 1."""
        ratio = self.figure(row, milliseconds) / row.published
        return (1 / ratio if self.unit == "s per step" else ratio) - 1


# DGX A100: third NVLink, 300 GB/s in each direction; eight network cards of 200 Gbit/s for eight GPUs.
SELENE = Machine("a100", "80GiB", "300GB/s", "25GB/s")
# The rate of the network is not stated.
A100_ROCE = Machine("a100", "80GiB", "300GB/s", "25GB/s")
# H100 with HBM2e: 96 GB, 2.4 TB/s, of which operators reach 0.8; 400 Gbit/s of network for each GPU.
GRAND_TETON = Machine("h100", "96GB", "450GB/s", "50GB/s", ("--bandwidth", "1.92TB/s"))


def gpt(name, layers, width, heads):
    return Model(name, layers, width, heads, 51200, 2048)


SC21_MODELS = {
    m.name: m
    for m in (
        gpt("1.7B", 24, 2304, 24),
        gpt("3.6B", 30, 3072, 32),
        gpt("7.5B", 36, 4096, 32),
        gpt("18.4B", 40, 6144, 48),
        gpt("39.1B", 48, 8192, 64),
        gpt("76.1B", 60, 10240, 80),
        gpt("145.6B", 80, 12288, 96),
        gpt("310.1B", 96, 16384, 128),
        gpt("529.6B", 105, 20480, 128),
        gpt("1008B", 128, 25600, 160),
        gpt("174.6B", 96, 12288, 96),
        gpt("22B", 48, 6144, 64),
    )
}


def weak(name, shards, ranks, gpus, batch, published):
    return Row(
        SC21_MODELS[name],
        gpus,
        ranks,
        shards,
        batch,
        published,
        schedule="Interleaved1F1B" if ranks > 1 else "1F1B",
        chunks=None if ranks > 1 else 1,
    )


def wide(name, ranks, gpus, batch, published):
    return Row(SC21_MODELS[name], gpus, ranks, 8, batch, published, samples=1)


WEAK = Table(
    "weak",
    "Megatron-LM, weak scaling",
    "Narayanan et al., SC'21, arXiv 2104.04473, table 1",
    SELENE,
    "TFLOP/s per GPU",
    "",
    (
        weak("1.7B", 1, 1, 32, 512, 137),
        weak("3.6B", 2, 1, 64, 512, 138),
        weak("7.5B", 4, 1, 128, 512, 142),
        weak("18.4B", 8, 1, 256, 1024, 135),
        weak("39.1B", 8, 2, 512, 1536, 138),
        weak("76.1B", 8, 4, 1024, 1792, 140),
        weak("145.6B", 8, 8, 1536, 2304, 148),
        weak("310.1B", 8, 16, 1920, 2160, 155),
        weak("529.6B", 8, 35, 2520, 2520, 163),
        weak("1008B", 8, 64, 3072, 3072, 163),
    ),
)

WIDE = Table(
    "wide",
    "Megatron-LM, more replicas",
    "Narayanan et al., SC'21, arXiv 2104.04473, table 2, rows of PTD parallelism",
    SELENE,
    "TFLOP/s per GPU",
    "",
    (
        wide("174.6B", 12, 384, 1536, 153),
        wide("174.6B", 12, 768, 1536, 149),
        wide("174.6B", 12, 1536, 1536, 141),
        wide("529.6B", 35, 560, 2240, 171),
        wide("529.6B", 35, 1120, 2240, 167),
        wide("529.6B", 35, 2240, 2240, 159),
    ),
)


def recomputed(name, ranks, gpus, batch, samples, chunks, full, selective):
    """Two jobs: all recomputed; the scores alone. \\param full and selective seconds of a step"""
    for seconds, all_of_it in ((full, True), (selective, False)):
        if seconds:
            yield Row(
                SC21_MODELS[name],
                gpus,
                ranks,
                8,
                batch,
                seconds,
                samples=samples,
                schedule="Interleaved1F1B" if ranks > 1 else "1F1B",
                chunks=chunks,
                recompute=all_of_it,
                attention="full" if all_of_it else "selective",
                note="all" if all_of_it else "scores",
            )


RECOMPUTED = Table(
    "recomputed",
    "Megatron-LM, what is recomputed",
    "Korthikanti et al., MLSys 2023, arXiv 2205.05198, tables 3 and 5, section 6.3",
    SELENE,
    "s per step",
    "recomputed",
    (
        *recomputed("22B", 1, 8, 4, 4, 1, 1.42, 1.10),
        *recomputed("174.6B", 8, 64, 64, 1, 3, 18.13, 13.75),
        *recomputed("529.6B", 35, 280, 280, 1, 3, 49.05, 37.83),
        *recomputed("1008B", 64, 512, 512, 1, 2, 94.42, 71.49),
        *recomputed("529.6B", 35, 2240, 2240, 1, 3, None, 39.15),
    ),
)

# The vocabulary is not stated: with 32,000 tokens all four models have the parameters of their names.
ZB_MODELS = {
    name: Model(name, layers, width, heads, 32000, 1024)
    for name, layers, width, heads in (
        ("1.5B", 22, 2304, 24),
        ("6.2B", 30, 4096, 32),
        ("14.6B", 46, 5120, 40),
        ("28.3B", 62, 6144, 48),
    )
}
# Where embedding and head are tied, the first rank and the last wait for each other's gradient at the end of each step.
UNTIED = {
    name: replace(model, flags=tuple(flag for flag in model.flags if flag != "--tied"))
    for name, model in ZB_MODELS.items()
}


def zero_bubble(name, ranks, samples, counts, published, memory):
    """\\param published by schedule: samples a second and GPU, one for each number of microbatches
    \\param memory GB, by schedule, for any number of microbatches"""
    for (schedule, throughputs), used in zip(published.items(), memory, strict=True):
        # ZB-2p, whose steps overlap by post-validation, is timed as ZB-H2.
        post_validated = schedule == "ZB-H2"
        model = (UNTIED if post_validated else ZB_MODELS)[name]
        # Of the interleaved schedule each layer is a stage, as are the embedding and the head.
        chunks = {"Interleaved1F1B": (model.layers + 2) // ranks, "ZBVZeroBubble": 2}.get(schedule, 1)
        for count, throughput in zip(counts, throughputs):
            yield Row(
                model,
                ranks,
                ranks,
                1,
                count * samples,
                throughput,
                samples=samples,
                schedule=schedule,
                chunks=chunks,
                even=False,
                recompute=False,
                memory=used,
                post_validated=post_validated,
            )


ONE_PIPELINE = (
    *zero_bubble(
        "1.5B",
        8,
        6,
        (24, 32, 64),
        {
            "1F1B": (11.8, 12.5, 13.6),
            "Interleaved1F1B": (13.1, 13.4, 13.9),
            "ZB-H1": (12.9, 13.4, 14.2),
            "ZB-H2": (14.5, 14.8, 14.9),
        },
        (30, 40, 32, 59),
    ),
    *zero_bubble(
        "6.2B",
        8,
        3,
        (24, 32, 64),
        {
            "1F1B": (3.50, 3.70, 4.03),
            "Interleaved1F1B": (4.01, 4.08, 4.19),
            "ZB-H1": (3.88, 4.00, 4.20),
            "ZB-H2": (4.32, 4.35, 4.39),
        },
        (39, 48, 42, 70),
    ),
    *zero_bubble(
        "14.6B",
        16,
        1,
        (48, 64, 128),
        {
            "1F1B": (1.40, 1.49, 1.64),
            "Interleaved1F1B": (1.54, 1.59, 1.66),
            "ZB-H1": (1.61, 1.67, 1.76),
            "ZB-H2": (1.81, 1.83, 1.85),
        },
        (32, 39, 33, 51),
    ),
    *zero_bubble(
        "28.3B",
        32,
        1,
        (96, 128, 256),
        {
            "1F1B": (0.76, 0.80, 0.88),
            "Interleaved1F1B": (0.82, 0.85, 0.90),
            "ZB-H1": (0.87, 0.90, 0.96),
            "ZB-H2": (0.99, 1.00, 1.00),
        },
        (43, 58, 44, 74),
    ),
)


def waiting(published):
    """ZB-2p with the fewest microbatches, without post-validation. \\param published samples a second and GPU, by model"""
    for row in ONE_PIPELINE:
        if row.post_validated and row.model.name in published:
            yield replace(row, published=published.pop(row.model.name), post_validated=False, memory=None)


ZERO_BUBBLE = Table(
    "zero-bubble",
    "Zero bubble, one pipeline",
    "Qi et al., ICLR 2024, arXiv 2401.10241, tables 3, 4 and 7: 1F1B, 1F1B-I, ZB-1p, ZB-2p",
    A100_ROCE,
    "samples/s per GPU",
    "",
    (*ONE_PIPELINE, *waiting({"1.5B": 13.11, "6.2B": 4.00, "14.6B": 1.68, "28.3B": 0.91})),
    "GB",
)

ZB_V = Table(
    "zb-v",
    "Zero bubble, V",
    "Qi et al., ICLR 2024, arXiv 2401.10241, table 6: 1F1B, ZB-1p, ZB-V",
    A100_ROCE,
    "samples/s per GPU",
    "",
    (
        *zero_bubble(
            "6.2B",
            16,
            6,
            (48, 64, 128),
            {"1F1B": (3.38, 3.57, 3.91), "ZB-H1": (3.87, 4.00, 4.29), "ZBVZeroBubble": (4.15, 4.21, 4.35)},
            (61, 62, 64),
        ),
        *zero_bubble(
            "14.6B",
            24,
            2,
            (72, 96, 192),
            {"1F1B": (1.52, 1.61, 1.76), "ZB-H1": (1.72, 1.78, 1.89), "ZBVZeroBubble": (1.85, 1.88, 1.93)},
            (44, 46, 45),
        ),
        *zero_bubble(
            "28.3B",
            32,
            2,
            (96, 128, 256),
            {"1F1B": (0.82, 0.87, 0.95), "ZB-H1": (0.94, 0.97, 1.03), "ZBVZeroBubble": (1.01, 1.02, 1.06)},
            (69, 73, 71),
        ),
    ),
    "GB",
)

LLAMA = Model(
    "Llama 3.1 405B",
    126,
    16384,
    128,
    128256,
    8192,
    ("--kind", "llama", "--key-heads", "8", "--inner", "53248", "--dtype", "bf16", "--kernels", "fused"),
    "flash",
)


def titan(ranks, batch, schedule, published, memory):
    return Row(
        LLAMA,
        512,
        ranks,
        8,
        batch,
        published,
        schedule=schedule,
        chunks=1 if schedule == "1F1B" else None,
        even=None,
        sharded=True,
        memory=memory,
    )


TITAN = Table(
    "titan",
    "torchtitan, Llama 3.1 405B on 512 H100",
    "Liang et al., ICLR 2025, arXiv 2410.06511, table 4 (16 ranks); torchtitan's "
    "benchmarks/llama3_h100_202412_torchtitan.md, table "
    "5 (8 ranks)",
    GRAND_TETON,
    "tokens/s per GPU",
    "",
    (
        titan(16, 128, "1F1B", 100, 78.0),
        titan(16, 128, "Interleaved1F1B", 130, 80.3),
        titan(8, 256, "1F1B", 100, 82.5),
        titan(8, 256, "Interleaved1F1B", 128, 72.7),
    ),
    "GiB",
)

TABLES = (WEAK, WIDE, RECOMPUTED, ZERO_BUBBLE, ZB_V, TITAN)

# The row of each kind of GPU with which the efficiency of its matrix products is found: table and place in it.
CALIBRATED_BY = {"a100": ("weak", 6), "h100": ("titan", 0)}

# Profiled milliseconds of one stage: Qi et al., arXiv 2401.10241, table 9, at the least number of microbatches of each model.
PROFILED = {
    "1.5B": (6, 3, 18.522, 18.086, 9.337),
    "6.2B": (3, 4, 29.718, 29.444, 19.927),
    "14.6B": (1, 3, 11.347, 11.248, 8.132),
    "28.3B": (1, 2, 10.419, 10.207, 7.715),
}

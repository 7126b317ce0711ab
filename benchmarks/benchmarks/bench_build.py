"""What the compiler makes of the kernels; NVRTC needs no GPU for it."""

from cupyflash import choose, compiler


class Build:
    """The worst of all variants of one architecture; ``python -m cupyflash compile`` prints each of them."""

    params = ["sm_80"]
    param_names = ("arch",)
    timeout = 1800

    def setup_cache(self):
        return {arch: [compiler.compile_offline(v, arch) for v in choose.variants(arch)] for arch in self.params}

    def track_compile_seconds(self, records, arch):
        return max(record.seconds for record in records[arch])

    def track_registers(self, records, arch):
        return max(record.registers for record in records[arch])

    def track_spills(self, records, arch):
        return sum(record.spill_bytes for record in records[arch])

    track_compile_seconds.unit = "seconds"
    track_registers.unit = "registers"
    track_spills.unit = "bytes"

"""What the compiler makes of the kernels; NVRTC needs no GPU for it."""

from cupyflash import choose, compiler


class Build:
    """The worst of what a training step at head_dim 128 runs; ``python -m cupyflash compile`` prints them all."""

    params = ["sm_80", "sm_90"]
    param_names = ("arch",)
    timeout = 1800

    def setup_cache(self):
        return {arch: [compiler.compile_offline(one, arch) for one in self.chosen(arch)] for arch in self.params}

    @staticmethod
    def chosen(arch):
        """The bfloat16 kernels without options; on Hopper with both forwards."""
        return [
            variant
            for variant in choose.variants(int(arch.removeprefix("sm_")))
            if variant.dtype == "bfloat16"
            and getattr(variant.spec, "head_dim", None) == 128  # the kernel of dsink has none
            and variant.spec.access == 16
            and not getattr(variant.spec, "float32_out", False)
            and not getattr(variant.spec, "deterministic", False)
        ]

    def track_compile_seconds(self, records, arch):
        return max(record.seconds for record in records[arch])

    def track_registers(self, records, arch):
        return max(record.registers for record in records[arch])

    def track_spills(self, records, arch):
        return sum(record.spill_bytes for record in records[arch])

    track_compile_seconds.unit = "seconds"
    track_registers.unit = "registers"
    track_spills.unit = "bytes"

//! Which family of tensor-core kernels runs on a device.

use std::sync::OnceLock;

use crate::Device;

/// The variable that says what `auto` is, for measurements: `mma` or `wgmma`.
pub const KERNELS_VARIABLE: &str = "MSTAR_KERNELS";

/// Which family of tensor-core kernels runs on a device. Bits may differ between families; the CPU has one of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// For each shape the faster of those that the card has.
    #[default]
    Auto,
    /// `mma.sync`, on sm_80 and up.
    Mma,
    /// `wgmma`, on sm_90a, wherever there is a kernel of it for the shape; `mma.sync` for the others.
    Wgmma,
}

impl Kernels {
    /// Reads `auto`, `mma` or `wgmma`.
    pub fn parse(name: &str) -> Option<Kernels> {
        match name {
            "auto" => Some(Kernels::Auto),
            "mma" => Some(Kernels::Mma),
            "wgmma" => Some(Kernels::Wgmma),
            _ => None,
        }
    }

    /// Its name in specs.
    pub fn name(self) -> &'static str {
        match self {
            Kernels::Auto => "auto",
            Kernels::Mma => "mma",
            Kernels::Wgmma => "wgmma",
        }
    }

    /// Of a device: `auto` becomes the family that is faster on its card, and a family that it lacks the other one.
    pub fn on(self, device: Device) -> Kernels {
        #[cfg(feature = "cuda")]
        if device != Device::Cpu
            && crate::cuda::Context::of(device).is_ok_and(crate::cuda::Context::is_hopper)
        {
            return if self.settled() == Kernels::Mma { Kernels::Mma } else { Kernels::Wgmma };
        }
        let _ = device;
        Kernels::Mma
    }

    /// As it is, or what [`KERNELS_VARIABLE`] says in place of `auto`. Another word there counts as none.
    pub fn settled(self) -> Kernels {
        static ASKED: OnceLock<Kernels> = OnceLock::new();
        match self {
            Kernels::Auto => *ASKED.get_or_init(|| {
                let said = std::env::var(KERNELS_VARIABLE).ok();
                said.as_deref().and_then(Kernels::parse).unwrap_or_default()
            }),
            said => said,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for kernels in [Kernels::Auto, Kernels::Mma, Kernels::Wgmma] {
            assert_eq!(Kernels::parse(kernels.name()), Some(kernels));
        }
        assert_eq!(Kernels::parse("tma"), None);
        assert_eq!(Kernels::Mma.settled(), Kernels::Mma);
    }
}

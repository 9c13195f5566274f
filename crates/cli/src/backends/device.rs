//! Which device a spec or `--device` means on this machine.

use anyhow::bail;
use mstar_core::spec::DeviceChoice;
use mstar_kernels::Device;
use mstar_kernels::cards::{Driver, NoCuda};

/// The device to run on, and the one line that says why when it was not named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// The device.
    pub device: Device,
    /// What to tell the user on stderr; `None` when they named the device.
    pub note: Option<String>,
}

/// Settles `choice`. The CUDA driver is asked only when the choice leaves it open or names it.
///
/// # Errors
/// A CUDA device was named, and there is no driver or no such card.
pub(crate) fn choose(choice: DeviceChoice) -> anyhow::Result<Chosen> {
    choose_with(choice, mstar_kernels::cuda::driver)
}

/// Settles a spec's `device: auto`: the first card where there is one that can be used, a compiler for its kernels, and nothing in
/// the spec that it does not serve, which `serves` says; else the CPU. The emulated device is for tests, and takes minutes where
/// the CPU takes seconds: it is taken only by name.
pub(crate) fn auto(serves: impl FnOnce(Device) -> Result<(), String>) -> Chosen {
    auto_with(mstar_kernels::cuda::driver, super::compiler::ready, serves)
}

fn auto_with(
    driver: impl FnOnce() -> Result<Driver, NoCuda>,
    ready: impl FnOnce(Device) -> Result<(), String>,
    serves: impl FnOnce(Device) -> Result<(), String>,
) -> Chosen {
    let card = driver().map_err(|why| why.to_string()).and_then(|driver| {
        let card = driver.cards.into_iter().next();
        card.ok_or_else(|| "the CUDA driver sees no card".to_string())
    });
    let found = card.and_then(|card| {
        let device = Device::Cuda(card.ordinal);
        ready(device).and_then(|()| serves(device)).map_err(|why| format!("not {device}: {why}"))?;
        Ok((device, card.name))
    });
    match found {
        Ok((device, name)) => Chosen { device, note: Some(format!("device auto: {device} ({name})")) },
        Err(why) => Chosen { device: Device::Cpu, note: Some(format!("device auto: cpu ({why})")) },
    }
}

fn choose_with(
    choice: DeviceChoice,
    driver: impl FnOnce() -> Result<Driver, NoCuda>,
) -> anyhow::Result<Chosen> {
    let ordinal = match choice {
        DeviceChoice::Named(Device::Cuda(ordinal)) => ordinal,
        DeviceChoice::Named(device) => return Ok(Chosen { device, note: None }),
        DeviceChoice::Auto => {
            let why = match driver() {
                Ok(driver) => match driver.cards.first() {
                    Some(card) => format!("say --device cuda:{} for {}", card.ordinal, card.name),
                    None => "the CUDA driver sees no card".to_string(),
                },
                Err(why) => why.to_string(),
            };
            return Ok(Chosen { device: Device::Cpu, note: Some(format!("device auto: cpu ({why})")) });
        }
    };
    match driver() {
        Err(why) => bail!("device cuda:{ordinal}: {why}; use --device cpu"),
        Ok(driver) => match driver.cards.iter().find(|card| card.ordinal == ordinal) {
            None => bail!("device cuda:{ordinal}: {}; use --device cpu", cards_in_words(driver.cards.len())),
            Some(_) => Ok(Chosen { device: Device::Cuda(ordinal), note: None }),
        },
    }
}

fn cards_in_words(cards: usize) -> String {
    match cards {
        0 => "the CUDA driver sees no card".into(),
        1 => "there is one card, cuda:0".into(),
        n => format!("there are {n} cards, cuda:0 to cuda:{}", n - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mstar_kernels::cards::Card;

    fn with_cards(cards: u32) -> Result<Driver, NoCuda> {
        let card = |ordinal| Card {
            ordinal,
            name: "NVIDIA H200".into(),
            memory_bytes: 1 << 37,
            compute_capability: (9, 0),
            pools: true,
        };
        Ok(Driver { version: (12, 8), cards: (0..cards).map(card).collect() })
    }

    fn said(choice: &str, driver: Result<Driver, NoCuda>) -> String {
        match choose_with(DeviceChoice::parse(choice).unwrap(), || driver) {
            Ok(chosen) => chosen.note.unwrap_or_else(|| chosen.device.to_string()),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn f37_a_device_is_chosen_or_refused_in_one_line() {
        let none = || Err(NoCuda::NoDriver { tried: "libcuda.so.1".into() });
        assert_eq!(said("auto", none()), "device auto: cpu (no CUDA driver found (tried libcuda.so.1))");
        assert_eq!(said("auto", with_cards(0)), "device auto: cpu (the CUDA driver sees no card)");
        assert_eq!(said("auto", with_cards(1)), "device auto: cpu (say --device cuda:0 for NVIDIA H200)");
        assert_eq!(
            said("cuda", none()),
            "device cuda:0: no CUDA driver found (tried libcuda.so.1); use --device cpu"
        );
        assert_eq!(
            said("cuda:99", with_cards(1)),
            "device cuda:99: there is one card, cuda:0; use --device cpu"
        );
        assert_eq!(said("cuda:0", with_cards(8)), "cuda:0");
    }

    #[test]
    fn auto_is_the_first_card_where_all_of_a_spec_runs_there_and_says_why_not() {
        let said = |driver, ready: Result<(), &str>, serves: Result<(), &str>| {
            let Chosen { device, note } =
                auto_with(|| driver, |_| ready.map_err(str::to_owned), |_| serves.map_err(str::to_owned));
            let note = note.expect("nobody named it");
            assert!(note.starts_with(&format!("device auto: {device} (")), "{note}");
            note
        };
        assert_eq!(said(with_cards(2), Ok(()), Ok(())), "device auto: cuda:0 (NVIDIA H200)");
        assert_eq!(
            said(Err(NoCuda::NoDriver { tried: "libcuda.so.1".into() }), Ok(()), Ok(())),
            "device auto: cpu (no CUDA driver found (tried libcuda.so.1))"
        );
        assert_eq!(said(with_cards(0), Ok(()), Ok(())), "device auto: cpu (the CUDA driver sees no card)");
        assert_eq!(said(with_cards(1), Err("no NVRTC"), Ok(())), "device auto: cpu (not cuda:0: no NVRTC)");
        assert_eq!(
            said(with_cards(1), Ok(()), Err("attn: backend paged: too wide")),
            "device auto: cpu (not cuda:0: attn: backend paged: too wide)"
        );
    }

    #[test]
    fn f37_cpu_never_asks_the_driver() {
        let asked = choose_with(DeviceChoice::Named(Device::Cpu), || panic!("the driver was asked"));
        assert_eq!(asked.unwrap(), Chosen { device: Device::Cpu, note: None });
    }
}

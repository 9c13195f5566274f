//! The one list of compiled backends, and `mstar backends`, which says what is in it and what the machine has.

#[cfg(feature = "cuda")]
mod compiler;
#[cfg(not(feature = "cuda"))]
#[path = "compiler_off.rs"]
mod compiler;
mod device;
mod registry;
mod softmax;
#[cfg(all(test, feature = "paged", feature = "dense"))]
mod swap;

pub(crate) use compiler::{device_memory, loaded as loaded_kernels};
pub(crate) use device::{Chosen, auto, choose};
pub(crate) use registry::{registry, workspace_bytes};
pub(crate) use softmax::softmax;

use mstar_core::attend::{AttnGeometry, BackendFactory, Reason, Softmax};
use mstar_core::kv::{KvConfig, KvLayout};
use mstar_kernels::cards::{Driver, NoCuda};
use mstar_kernels::cpu::Isa;
use mstar_kernels::{DType, Device};
use serde_json::{Value, json};

use crate::exit::Exit;
use crate::machine::Machine;
use crate::text::{bytes, print, wrap};

/// Arguments of `mstar backends`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(crate) fn command(args: Arguments) -> anyhow::Result<Exit> {
    let machine = Machine::probe();
    let driver = mstar_kernels::cuda::driver();
    let text =
        if args.json { format!("{:#}\n", as_json(&machine, &driver)) } else { as_text(&machine, &driver) };
    print(&text)?;
    Ok(Exit::Success)
}

fn as_text(machine: &Machine, driver: &Result<Driver, NoCuda>) -> String {
    let mut out = format!("mstar {}\n\nbackends\n", env!("CARGO_PKG_VERSION"));
    let backends = registry();
    for factory in backends.iter() {
        let text = match serves_nothing(&**factory) {
            Some(why) => format!("{}; runs nothing in this version: {why}", factory.about()),
            None => factory.about().to_string(),
        };
        out += &wrap(&format!("  {:<9}", factory.name()), &text);
    }
    if let Some(factory) = backends.sparse() {
        out += &wrap(&format!("  {:<9}", factory.name()), factory.about());
    }
    for (name, feature) in backends.not_compiled() {
        out += &wrap(&format!("  {name:<9}"), &format!("not compiled in; build with --features {feature}"));
    }
    out += "\ndevices\n";
    out += &wrap("  cpu      ", &cpu_line(machine));
    match driver {
        Err(why) => out += &wrap("  cuda     ", &format!("{why}; the CPU runs everything")),
        Ok(driver) => {
            let (major, minor) = driver.version;
            let cards = match driver.cards.len() {
                0 => "it sees no card",
                _ => "--device cuda:N runs on one",
            };
            out += &wrap("  cuda     ", &format!("driver for CUDA {major}.{minor}; {cards}"));
            for card in &driver.cards {
                let (major, minor) = card.compute_capability;
                let pools = if card.pools { "from pools" } else { "without pools: to take or free it waits" };
                let of = bytes(card.memory_bytes as u128);
                let line = format!("{}, sm_{major}{minor}, {of} of memory, {pools}", card.name);
                out += &wrap(&format!("  cuda:{:<4}", card.ordinal), &line);
            }
        }
    }
    out += &wrap("  nvrtc    ", &compiler_line());
    if let Some((folder, kernels, size)) = compiler::cache() {
        let held = match kernels {
            0 => "empty".into(),
            1 => format!("1 kernel, {}", bytes(size.into())),
            n => format!("{n} kernels, {}", bytes(size.into())),
        };
        out += &wrap("  cache    ", &format!("{} ({held})", folder.display()));
    }
    out
}

/// Why a backend serves neither an ordinary cache of heads nor one of latents on the CPU, if it does not.
fn serves_nothing(factory: &dyn BackendFactory) -> Option<Reason> {
    let layouts = [
        KvLayout::Nhd { num_kv_heads: 8, head_dim: 128 },
        KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 },
    ];
    let mut why = None;
    for layout in layouts {
        let kv = KvConfig::new(layout, DType::Bf16, 16, 2);
        let geometry = AttnGeometry::over(&kv, 32, DType::Bf16, Softmax::scaled(1.0));
        why = Some(factory.supports(Device::Cpu, &geometry).err()?);
    }
    why
}

fn cpu_line(machine: &Machine) -> String {
    let name = if machine.cpu.is_empty() { "processor" } else { &machine.cpu };
    let others: Vec<&str> = Isa::supported().iter().map(|isa| isa.name()).collect();
    let threads =
        if machine.threads == 1 { "1 thread".into() } else { format!("{} threads", machine.threads) };
    let memory = match (machine.memory_total, machine.memory_available) {
        (Some(total), Some(free)) => {
            format!("{} of memory, {} available", bytes(total.into()), bytes(free.into()))
        }
        _ => "memory not told".into(),
    };
    format!("{name}, {} (it has {}), {threads}, {memory}", machine.isa.name(), others.join(", "))
}

fn compiler_line() -> String {
    match compiler::nvrtc() {
        Ok((path, (major, minor))) => format!("{path}, version {major}.{minor}"),
        Err(why) => why.to_string(),
    }
}

fn as_json(machine: &Machine, driver: &Result<Driver, NoCuda>) -> Value {
    let backends = registry();
    let sparse = backends.sparse().map(|f| json!({ "name": f.name(), "about": f.about(), "runs": true }));
    let compiled: Vec<Value> = backends
        .iter()
        .map(|f| {
            json!({
                "name": f.name(),
                "about": f.about(),
                "runs": serves_nothing(&**f).is_none(),
            })
        })
        .chain(sparse)
        .collect();
    let absent: Vec<Value> =
        backends.not_compiled().map(|(name, feature)| json!({ "name": name, "feature": feature })).collect();
    let cuda = match driver {
        Err(why) => json!({ "driver": null, "why": why.to_string(), "cards": [] }),
        Ok(driver) => json!({
            "driver": format!("{}.{}", driver.version.0, driver.version.1),
            "why": null,
            "cards": driver.cards.iter().map(|card| json!({
                "device": format!("cuda:{}", card.ordinal),
                "name": card.name,
                "compute_capability": format!("{}.{}", card.compute_capability.0, card.compute_capability.1),
                "memory_bytes": card.memory_bytes,
                "memory_pools": card.pools,
            })).collect::<Vec<_>>(),
        }),
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "backends": compiled,
        "not_compiled": absent,
        "cpu": {
            "name": machine.cpu,
            "isa": machine.isa.name(),
            "isas": Isa::supported().iter().map(|isa| isa.name()).collect::<Vec<_>>(),
            "threads": machine.threads,
            "memory_bytes": machine.memory_total,
            "memory_available_bytes": machine.memory_available,
        },
        "cuda": cuda,
        "nvrtc": match compiler::nvrtc() {
            Ok((path, (major, minor))) => json!({ "path": path, "version": format!("{major}.{minor}"), "why": null }),
            Err(why) => json!({ "path": null, "version": null, "why": why }),
        },
        "kernel_cache": compiler::cache().map(|(folder, kernels, bytes)| {
            json!({ "folder": folder.display().to_string(), "kernels": kernels, "bytes": bytes })
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::COLUMNS;
    use mstar_kernels::cards::Card;

    #[test]
    fn what_is_printed_fits_a_terminal() {
        let card = Card {
            ordinal: 0,
            name: "NVIDIA H200 with a name that is much longer than any real card has ever had before".into(),
            memory_bytes: 1 << 37,
            compute_capability: (9, 0),
            pools: true,
        };
        let without = Card { pools: false, ..card.clone() };
        let said = |card| as_text(&Machine::probe(), &Ok(Driver { version: (12, 8), cards: vec![card] }));
        assert!(said(without.clone()).contains("without pools") && said(card.clone()).contains("from pools"));
        let drivers = [
            Err(NoCuda::NoDriver { tried: "libcuda.so.1, libcuda.so".into() }),
            Err(NoCuda::Broken { call: "cuInit", code: Some(999) }),
            Ok(Driver { version: (12, 8), cards: vec![] }),
            Ok(Driver { version: (12, 8), cards: vec![card, without] }),
        ];
        for driver in drivers {
            let text = as_text(&Machine::probe(), &driver);
            assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        }
    }
}

//! The `mstar` program: the only crate that parses arguments, prints and exits.
//!
//! Each subcommand is a room with its own arguments and one entry, `command(args) -> anyhow::Result<Exit>`.
#![deny(unsafe_code)]

mod backends;
mod bench;
mod exit;
mod explain;
mod interrupt;
mod kernels;
mod machine;
mod output;
mod parity;
mod run;
mod text;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mstar_kernels::cpu::Isa;

use crate::exit::Exit;

/// The attention layer of an inference engine: run workloads, check numbers, explain costs.
#[derive(Debug, Parser)]
#[command(name = "mstar", version, about, arg_required_else_help = true, after_help = exit::HELP, max_term_width = text::COLUMNS)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a workload described by a spec.
    Run(run::Arguments),
    /// Check numbers against recorded reference tensors.
    Parity(parity::Arguments),
    /// Time kernels alone over a list of shapes.
    Bench(bench::Arguments),
    /// Say what a spec resolves to, what it will cost, and which kernels will run.
    Explain(explain::Arguments),
    /// Say what is compiled in and which devices are here.
    Backends(backends::Arguments),
    /// Compile CUDA kernels ahead of time.
    Kernels(kernels::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // An instruction set asked for in the environment and not there is refused before any work.
    if let Err(refused) = Isa::requested() {
        text::say(refused);
        return Exit::Refused.into();
    }
    let outcome = match arguments.command {
        Command::Run(args) => run::command(args),
        Command::Parity(args) => parity::command(args),
        Command::Bench(args) => bench::command(args),
        Command::Explain(args) => explain::command(args),
        Command::Backends(args) => backends::command(args),
        Command::Kernels(args) => kernels::command(args),
    };
    match outcome {
        Ok(exit) => exit.into(),
        Err(error) => {
            // A refused spec says one line for each fault; each is a line of ours.
            for line in format!("{error:#}").lines() {
                text::say(line);
            }
            Exit::Refused.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn help_of_every_subcommand_keeps_to_80_columns() {
        let mut root = Arguments::command();
        root.build();
        let names: Vec<String> = root.get_subcommands().map(|c| c.get_name().to_owned()).collect();
        assert!(names.len() >= 6, "{names:?}");
        // What is not a terminal counts as 100 columns wide, and a wide terminal as what it is.
        let mut texts =
            vec![("mstar".to_owned(), root.render_help()), ("mstar".to_owned(), root.render_long_help())];
        for name in names {
            let command = root.find_subcommand_mut(&name).unwrap();
            texts.push((name.clone(), command.render_help()));
            texts.push((name, command.render_long_help()));
        }
        for (name, text) in texts {
            for line in text.to_string().lines() {
                assert!(line.chars().count() <= text::COLUMNS, "{name}: {line}");
            }
        }
    }
}

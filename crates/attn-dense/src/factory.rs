//! The options a spec may give this backend, and the reason why it is not built.

use mstar_core::attend::Unbuilt;
use mstar_core::spec::{Faults, Fields, Node, Section};

/// Why nothing is built.
const WHY: &str = "the dense pass is not built yet; backend: paged attends the same step";

static OPTIONS: Section = Section { name: "the dense backend", keys: &["keep_prefix", "prefix"] };

/// What a spec may ask of this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseOptions {
    /// `keep_prefix`: whether a gathered prefix is kept between steps, for as long as its stream's generation stands.
    pub keep_prefix: bool,
    /// `prefix`: where the frozen prefix is read from.
    pub prefix: PrefixSource,
}

/// Where a frozen prefix is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixSource {
    /// `gathered`: a contiguous copy in the slot's own buffer.
    Gathered,
    /// `pages`: the cache's pages themselves.
    Pages,
}

impl DenseOptions {
    fn read(node: &Node, faults: &Faults) -> Option<DenseOptions> {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let keep_prefix = f.flag_or("keep_prefix", true);
        let sources = [("gathered", PrefixSource::Gathered), ("pages", PrefixSource::Pages)];
        let prefix = f.word_or("prefix", PrefixSource::Gathered, &sources);
        f.finish("here");
        Some(DenseOptions { keep_prefix, prefix })
    }
}

/// The backend `dense`, which refuses every geometry: it is not built.
pub const DENSE: Unbuilt<DenseOptions> = Unbuilt {
    name: "dense",
    about: "one dense pass over a frozen prefix and the fresh tokens",
    aliases: &[],
    auto: true,
    why: WHY,
    read: DenseOptions::read,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<DenseOptions, String> {
        let faults = Faults::new();
        let options = DenseOptions::read(&Node::flat("resources.attn", pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn options_are_typed_and_unknown_keys_refused() {
        let default = DenseOptions { keep_prefix: true, prefix: PrefixSource::Gathered };
        assert_eq!(read(&[]), Ok(default));
        let other = DenseOptions { keep_prefix: false, prefix: PrefixSource::Pages };
        assert_eq!(read(&[("keep_prefix", "false"), ("prefix", "pages")]), Ok(other));
        assert!(read(&[("prefix", "page")]).unwrap_err().contains("did you mean pages?"));
        assert!(read(&[("keep-prefix", "true")]).is_err());
    }
}

//! Page keys and the root they chain from.
#![forbid(unsafe_code)]

use crate::resource::Fingerprint;
use crate::{ResourceName, kv::KvConfig, kv::KvLayout};

/// A page's key: a digest of its tokens and of its parent's key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub [u8; 32]);

impl std::fmt::Debug for PageKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// How a page's key comes from its parent's key and its tokens. The index compares tokens and parents as well,
/// so that a poor choice costs time and shares nothing wrongly.
pub type PageHash = fn(&PageKey, &[u64]) -> PageKey;

/// The usual choice: BLAKE3 over the parent's key and the tokens.
pub(in crate::kv) fn blake3_page(parent: &PageKey, tokens: &[u64]) -> PageKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.0);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    PageKey(*hasher.finalize().as_bytes())
}

/// Everything that a stored page depends on beyond its own and earlier tokens, apart from a request's salt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    encoded: Vec<u8>,
}

/// Appends a field so that no two sequences of fields have the same bytes: a presence byte, a length, the bytes.
fn field(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    out.push(u8::from(bytes.is_some()));
    let bytes = bytes.unwrap_or_default();
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

impl Namespace {
    /// The namespace of a cache whose pages depend on these resources too. Their order does not matter.
    pub fn new(config: &KvConfig, depends_on: &[(ResourceName, Option<Fingerprint>)]) -> Namespace {
        let mut encoded = Vec::new();
        field(&mut encoded, Some(b"mstar page key 1"));
        let layout = match config.layout {
            KvLayout::Nhd { num_kv_heads, head_dim } => [0, num_kv_heads as u64, head_dim as u64],
            KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } => {
                [1, kv_lora_rank as u64, qk_rope_head_dim as u64]
            }
        };
        let sizes = [config.page_size, config.num_layers, config.world_size].map(|n| n as u64);
        let numbers: Vec<u8> = layout.iter().chain(&sizes).flat_map(|n| n.to_le_bytes()).collect();
        field(&mut encoded, Some(&numbers));
        field(&mut encoded, Some(config.dtype.name().as_bytes()));
        for plane in &config.planes {
            field(&mut encoded, Some(plane.name.as_bytes()));
            field(&mut encoded, Some(plane.dtype.name().as_bytes()));
            field(&mut encoded, Some(&(plane.width as u64).to_le_bytes()));
            let layers: Option<Vec<u8>> = plane
                .layers
                .as_ref()
                .map(|some| some.iter().flat_map(|l| (*l as u64).to_le_bytes()).collect());
            field(&mut encoded, layers.as_deref());
        }
        field(&mut encoded, None);
        let mut others: Vec<_> = depends_on.iter().collect();
        others.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, fingerprint) in others {
            field(&mut encoded, Some(name.as_str().as_bytes()));
            field(&mut encoded, fingerprint.as_ref().map(|f| f.0.as_slice()));
        }
        field(&mut encoded, None);
        Namespace { encoded }
    }

    /// The bytes that are hashed into a root.
    pub fn as_bytes(&self) -> &[u8] {
        &self.encoded
    }

    /// The root under which a request's pages are keyed. No salt and an empty salt are two namespaces.
    pub fn root(&self, salt: Option<&[u8]>) -> PageKey {
        let mut bytes = self.encoded.clone();
        field(&mut bytes, salt);
        PageKey(*blake3::hash(&bytes).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use mstar_kernels::DType;

    use super::*;

    fn config() -> KvConfig {
        KvConfig::new(KvLayout::Nhd { num_kv_heads: 2, head_dim: 8 }, DType::F32, 4, 8)
    }

    fn print(bytes: &str) -> Option<Fingerprint> {
        Some(Fingerprint(bytes.as_bytes().to_vec()))
    }

    #[test]
    fn f25_no_two_namespaces_have_the_same_root() {
        let with = |attn, lora| {
            Namespace::new(&config(), &[(ResourceName::new("attn"), attn), (ResourceName::new("lora"), lora)])
        };
        let roots = [
            with(None, None).root(Some(b"X")),
            with(None, print("X")).root(None),
            with(print("X"), None).root(None),
            with(print("a"), print("bc")).root(None),
            with(print("ab"), print("c")).root(None),
            with(print(""), None).root(None),
            with(None, None).root(None),
            with(None, None).root(Some(b"")),
            with(None, None).root(Some(b"\x01\0\0\0\0\0\0\0\0")),
            with(None, None).root(Some(b"X\0")),
            Namespace::new(&config(), &[(ResourceName::new("attn"), None)]).root(None),
            Namespace::new(&KvConfig { page_size: 8, ..config() }, &[]).root(None),
            Namespace::new(&KvConfig { dtype: DType::Bf16, ..config() }, &[]).root(None),
            Namespace::new(&config().shard(2).unwrap(), &[]).root(None),
            Namespace::new(&config(), &[]).root(None),
        ];
        for (i, a) in roots.iter().enumerate() {
            assert!(roots[..i].iter().all(|b| a != b), "root {i}");
        }
        let swapped = [(ResourceName::new("lora"), None), (ResourceName::new("attn"), None)];
        assert_eq!(Namespace::new(&config(), &swapped), with(None, None));
    }
}

//! What a kernel is compiled for.

use std::fmt;

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Target {
    /// A card of this compute capability.
    Sm {
        /// The major number.
        major: u32,
        /// The minor number.
        minor: u32,
    },
    /// The host, by the emulator.
    #[cfg(feature = "emulator")]
    Emulated,
}

impl Target {
    /// Reads `sm_90a`, `sm_80`, `90`, `emulated`.
    ///
    /// # Errors
    /// A word that is none of these, with what is.
    pub fn parse(word: &str) -> Result<Target, String> {
        #[cfg(feature = "emulator")]
        if word == "emulated" {
            return Ok(Target::Emulated);
        }
        let digits = word.strip_prefix("sm_").unwrap_or(word);
        let digits = digits.strip_suffix('a').unwrap_or(digits);
        match digits.parse::<u32>() {
            Ok(number) if (80..1000).contains(&number) => {
                Ok(Target::Sm { major: number / 10, minor: number % 10 })
            }
            Ok(_) => Err(format!("{word}: the oldest architecture that the kernels run on is sm_80")),
            Err(_) => Err(format!("{word}: expected an architecture such as sm_80 or sm_90a")),
        }
    }
}

/// `sm_90a`: Hopper's own instructions need the suffix, and its code runs on nothing else.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Target::Sm { major: 9, minor: 0 } => f.write_str("sm_90a"),
            Target::Sm { major, minor } => write!(f, "sm_{major}{minor}"),
            #[cfg(feature = "emulator")]
            Target::Emulated => f.write_str("emulated"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_read_and_told() {
        for (word, told) in [("sm_90a", "sm_90a"), ("sm_90", "sm_90a"), ("80", "sm_80"), ("sm_120", "sm_120")]
        {
            assert_eq!(Target::parse(word).unwrap().to_string(), told);
        }
        for word in ["", "sm_", "hopper", "sm_75", "sm_-90", "99999"] {
            assert!(Target::parse(word).unwrap_err().contains("sm_80"), "{word}");
        }
    }
}

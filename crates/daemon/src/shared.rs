//! Several mounts in one process: `--daemon=NAME`.
//!
//! The first command with a name starts the process ([`client`], [`process`]), later ones send it their plans
//! ([`wire`]) and wait for the answer. Only commands with the same identity share a process ([`identity`]): same
//! user, groups, capabilities, umask, namespaces, root directory and program. Others of the same name get another
//! one. Mounts that would conflict in one process stay apart ([`reach`], [`company`]).

pub mod client;
pub mod company;
pub mod identity;
pub mod process;
pub mod reach;
pub mod wire;

use crate::failure::Failure;
use std::path::{Path, PathBuf};

/// Longest name: socket addresses have room for 107 bytes.
const NAME_MAX: usize = 32;

/// Parses the NAME of `--daemon=NAME`.
///
/// # Errors
/// It cannot be part of a file name.
pub fn name(text: &str) -> Result<String, Failure> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match !text.is_empty() && text.len() <= NAME_MAX && !text.starts_with('.') && text.bytes().all(sound) {
        true => Ok(text.to_owned()),
        false => Err(Failure::usage(format!(
            "daemon: \"{text}\" is not a name of at most {NAME_MAX} letters, digits, dots, hyphens and underscores"
        ))),
    }
}

/// Returns the path of the socket for requests.
fn socket(directory: &Path, name: &str, identity: &str) -> PathBuf {
    directory.join(format!("{name}-{:016x}.shared", identity::digest(identity)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_into_names_of_files() {
        for text in ["a", "pool", "A.b-c_1", &"x".repeat(32)] {
            assert_eq!(name(text).unwrap(), text);
        }
        for text in ["", ".", "..", ".a", "a/b", "a b", "\u{e9}", "a\n", &"x".repeat(33)] {
            assert_eq!(name(text).unwrap_err().exit, crate::failure::Exit::Usage, "{text:?}");
        }
        // With the longest name, in a directory of usual length.
        let socket = socket(Path::new("/run/user/4294967294/nacre"), &"x".repeat(32), "");
        assert!(socket.as_os_str().len() < 108);
    }
}

//! Parsing and printing of a single setting, and the macros that make a structure of settings from
//! a table of keys.
//!
//! Called by the tables of settings. Invariant: for every value, `set` of the text from `print`
//! yields the value again.

use std::{
    ffi::OsString,
    fmt,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
};

/// Error of a specification: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError(pub String);

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpecError {}

/// A type that a setting can have.
pub trait Field: Default + PartialEq {
    /// Parses a value, or a bare key.
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String>;
    /// Prints the value: one text for each time that the key has to be written.
    fn print(&self) -> Vec<Vec<u8>>;
}

/// The value of a key, as text.
pub fn text(value: Option<&[u8]>) -> Result<&str, String> {
    let value = value.ok_or_else(|| "needs a value".to_owned())?;
    std::str::from_utf8(value).map_err(|_| format!("\"{}\" is not UTF-8", value.escape_ascii()))
}

impl Field for bool {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        *self = match value {
            None | Some(b"true" | b"yes" | b"on" | b"1") => true,
            Some(b"false" | b"no" | b"off" | b"0") => false,
            Some(other) => {
                return Err(format!(
                    "is a switch: leave the value out or write true or false, not \"{}\"",
                    other.escape_ascii()
                ));
            }
        };
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        if *self { vec![Vec::new()] } else { Vec::new() }
    }
}

impl Field for Option<String> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        *self = Some(text(value)?.to_owned());
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().map(|value| value.as_bytes().to_vec()).collect()
    }
}

impl Field for Vec<String> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        self.push(text(value)?.to_owned());
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().map(|value| value.as_bytes().to_vec()).collect()
    }
}

impl Field for PathBuf {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let value = value.filter(|value| !value.is_empty()).ok_or_else(|| "needs a path".to_owned())?;
        *self = PathBuf::from(OsString::from_vec(value.to_vec()));
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        if self.as_os_str().is_empty() { Vec::new() } else { vec![self.as_os_str().as_bytes().to_vec()] }
    }
}

impl Field for Option<PathBuf> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let mut path = PathBuf::new();
        path.set(value)?;
        *self = Some(path);
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().flat_map(Field::print).collect()
    }
}

impl Field for Vec<PathBuf> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let mut path = PathBuf::new();
        path.set(value)?;
        self.push(path);
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().flat_map(Field::print).collect()
    }
}

impl Field for Option<u32> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let value = text(value)?;
        *self = Some(value.parse().map_err(|_| format!("takes a number from 0 to {}, not \"{value}\"", u32::MAX))?);
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().map(|value| value.to_string().into_bytes()).collect()
    }
}

impl Field for Option<u64> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let value = text(value)?;
        *self = Some(value.parse().map_err(|_| format!("takes a whole number from 0 on, not \"{value}\""))?);
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().map(|value| value.to_string().into_bytes()).collect()
    }
}

impl Field for Option<i64> {
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
        let value = text(value)?;
        *self = Some(value.parse().map_err(|_| format!("takes a whole number, not \"{value}\""))?);
        Ok(())
    }
    fn print(&self) -> Vec<Vec<u8>> {
        self.iter().map(|value| value.to_string().into_bytes()).collect()
    }
}

/// Whether a value equals the default and need not be written.
pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Defines an enumeration whose values are written as words; the default is marked.
#[macro_export]
macro_rules! words {
    ($(#[$attribute:meta])* pub enum $name:ident { $($(#[$variant_attribute:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        pub enum $name { $($(#[$variant_attribute])* #[serde(rename = $word)] $variant,)* }

        impl $name {
            /// All words, in the order of the documentation.
            pub const WORDS: &'static [&'static str] = &[$($word),*];

            /// The word for this value.
            pub const fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }

            /// The value of a word.
            pub fn from_word(word: &str) -> Option<$name> {
                match word { $($word => Some($name::$variant),)* _ => None }
            }
        }

        impl $crate::settings::Field for $name {
            fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
                let word = $crate::settings::text(value)?;
                *self = $name::from_word(word).ok_or_else(|| format!("takes one of {}, not \"{word}\"", $name::WORDS.join(", ")))?;
                Ok(())
            }
            fn print(&self) -> Vec<Vec<u8>> {
                if *self == $name::default() { Vec::new() } else { vec![self.word().as_bytes().to_vec()] }
            }
        }
    };
}

/// Defines a structure of settings from a table of keys.
#[macro_export]
macro_rules! settings {
    ($(#[$attribute:meta])* pub struct $name:ident { $($(#[$field_attribute:meta])* $key:literal => $field:ident: $type:ty,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, ::serde::Serialize, ::serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_attribute])* #[serde(rename = $key, default, skip_serializing_if = "::nacre_layers::settings::is_default")] pub $field: $type,)*
        }

        impl $name {
            /// All keys, in the order of the documentation.
            pub const KEYS: &'static [&'static str] = &[$($key),*];

            /// The settings that differ from the default, as key and value; a switch has an empty
            /// value.
            pub fn settings(&self) -> Vec<(&'static str, Vec<u8>)> {
                #[allow(unused_mut)]
                let mut settings = Vec::new();
                $(settings.extend($crate::settings::Field::print(&self.$field).into_iter().map(|value| ($key, value)));)*
                settings
            }

            /// Sets a setting by its key; lists are appended to, everything else is replaced.
            ///
            /// # Errors
            /// An unknown key (the text lists the allowed ones), or an invalid value.
            pub fn set(&mut self, key: &str, value: Option<&[u8]>) -> Result<(), $crate::settings::SpecError> {
                $(if key == $key {
                    return $crate::settings::Field::set(&mut self.$field, value).map_err(|why| $crate::settings::SpecError(format!("\"{key}\" {why}")));
                })*
                let _ = value;
                Err($crate::settings::unknown_key(key, Self::KEYS))
            }
        }
    };
}

/// The error for a key that a layer does not have.
pub fn unknown_key(key: &str, allowed: &[&str]) -> SpecError {
    let allowed = if allowed.is_empty() {
        "it has no settings".to_owned()
    } else {
        format!("allowed are {}", allowed.join(", "))
    };
    SpecError(format!("unknown key \"{}\"; {allowed}", key.escape_debug()))
}

//! How one setting is read from text and printed, and the macros that make a structure of settings
//! from a table of keys.
//!
//! Called by `spec.rs` only. Invariant: for every value, `set` of what `print` gave yields the
//! value again.

use super::{LayerSpec, SpecError, StackSpec};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    ffi::OsString,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
};

/// A type that a setting can have.
pub(super) trait Field: Default + PartialEq {
    /// Takes a value, or a bare key.
    fn set(&mut self, value: Option<&[u8]>) -> Result<(), String>;
    /// Answers one text for each time that the key has to be written.
    fn print(&self) -> Vec<Vec<u8>>;
}

/// The value that belongs to a key, as text.
pub(super) fn text(value: Option<&[u8]>) -> Result<&str, String> {
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

/// Whether a value need not be written.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// An enumeration whose values are written as words; the default is marked.
macro_rules! words {
    ($(#[$attribute:meta])* pub enum $name:ident { $($(#[$variant_attribute:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

        impl $crate::spec::field::Field for $name {
            fn set(&mut self, value: Option<&[u8]>) -> Result<(), String> {
                let word = $crate::spec::field::text(value)?;
                *self = $name::from_word(word).ok_or_else(|| format!("takes one of {}, not \"{word}\"", $name::WORDS.join(", ")))?;
                Ok(())
            }
            fn print(&self) -> Vec<Vec<u8>> {
                if *self == $name::default() { Vec::new() } else { vec![self.word().as_bytes().to_vec()] }
            }
        }
    };
}

/// A structure of settings from a table of keys.
macro_rules! settings {
    ($(#[$attribute:meta])* pub struct $name:ident { $($(#[$field_attribute:meta])* $key:literal => $field:ident: $type:ty,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_attribute])* #[serde(rename = $key, default, skip_serializing_if = "field::is_default")] pub $field: $type,)*
        }

        impl $name {
            /// All keys, in the order of the documentation.
            pub const KEYS: &'static [&'static str] = &[$($key),*];

            /// The settings that differ from the default, as key and value; a switch has an empty
            /// value.
            pub fn settings(&self) -> Vec<(&'static str, Vec<u8>)> {
                #[allow(unused_mut)]
                let mut settings = Vec::new();
                $(settings.extend(field::Field::print(&self.$field).into_iter().map(|value| ($key, value)));)*
                settings
            }

            /// Gives a setting a value, by its name; lists grow, everything else is replaced.
            ///
            /// # Errors
            /// An unknown key (the text names the allowed ones), or a value that does not fit.
            pub fn set(&mut self, key: &str, value: Option<&[u8]>) -> Result<(), SpecError> {
                $(if key == $key {
                    return field::Field::set(&mut self.$field, value).map_err(|why| SpecError(format!("\"{key}\" {why}")));
                })*
                let _ = value;
                Err(field::unknown_key(key, Self::KEYS))
            }
        }
    };
}

pub(super) use {settings, words};

/// The error for a key that a layer does not have.
pub(super) fn unknown_key(key: &str, allowed: &[&str]) -> SpecError {
    let allowed = if allowed.is_empty() {
        "it has no settings".to_owned()
    } else {
        format!("allowed are {}", allowed.join(", "))
    };
    SpecError(format!("unknown key \"{}\"; {allowed}", key.escape_debug()))
}

/// The file as it is written, with the layers still untyped: so that an error can say which layer
/// it is in.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawStack {
    #[serde(default)]
    layer: Vec<toml::Table>,
}

/// Reads the TOML form of a stack.
pub(super) fn from_toml(text: &str) -> Result<StackSpec, SpecError> {
    let raw: RawStack = toml::from_str(text).map_err(|error| SpecError(error.to_string().trim_end().to_owned()))?;
    let layers =
        raw.layer.into_iter().enumerate().map(|(place, table)| layer(place + 1, table)).collect::<Result<_, _>>()?;
    Ok(StackSpec { layers })
}

fn layer(place: usize, mut table: toml::Table) -> Result<LayerSpec, SpecError> {
    let known = LayerSpec::NAMES.join(", ");
    let name = match table.remove("type") {
        Some(toml::Value::String(name)) => name,
        Some(other) => return Err(SpecError(format!("layer {place}: \"type\" takes one of {known}, not {other}"))),
        None => {
            return Err(SpecError(format!(
                "layer {place}: \"type\" is missing; write type = \"...\" with one of {known}"
            )));
        }
    };
    let Some(empty) = LayerSpec::named(&name) else {
        return Err(SpecError(format!(
            "layer {place}: there is no layer \"{}\"; there are {known}",
            name.escape_debug()
        )));
    };
    let read = match empty {
        LayerSpec::Host(_) => typed(table, super::HostSpec::KEYS).map(LayerSpec::Host),
        LayerSpec::Mem(_) => typed(table, super::MemSpec::KEYS).map(LayerSpec::Mem),
        LayerSpec::Union(_) => typed(table, super::UnionSpec::KEYS).map(LayerSpec::Union),
        LayerSpec::Remap(_) => typed(table, super::RemapSpec::KEYS).map(LayerSpec::Remap),
        LayerSpec::Readonly(_) => typed(table, super::ReadonlySpec::KEYS).map(LayerSpec::Readonly),
        LayerSpec::Shift(_) => typed(table, super::ShiftSpec::KEYS).map(LayerSpec::Shift),
        LayerSpec::OverrideStat(_) => typed(table, super::OverrideStatSpec::KEYS).map(LayerSpec::OverrideStat),
        LayerSpec::Throttle(_) => typed(table, super::ThrottleSpec::KEYS).map(LayerSpec::Throttle),
        LayerSpec::Trace(_) => typed(table, super::TraceSpec::KEYS).map(LayerSpec::Trace),
        LayerSpec::Cage(_) => typed(table, super::CageSpec::KEYS).map(LayerSpec::Cage),
    };
    read.map_err(|error| SpecError(format!("layer {place} ({name}): {error}")))
}

fn typed<T: DeserializeOwned>(table: toml::Table, keys: &[&str]) -> Result<T, SpecError> {
    if let Some(key) = table.keys().find(|key| !keys.contains(&key.as_str())) {
        return Err(unknown_key(key, keys));
    }
    table.try_into().map_err(|error: toml::de::Error| SpecError(error.to_string().trim_end().replace('\n', " ")))
}

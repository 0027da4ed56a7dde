//! The TOML form of a stack.
//!
//! Called by `spec.rs` only.

use super::{LayerSpec, SpecError, StackSpec};
use nacre_layers::settings::unknown_key;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The file with untyped layers, so that an error can name the layer it is in.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawStack {
    #[serde(default)]
    layer: Vec<toml::Table>,
}

/// Parses the TOML form.
pub(super) fn parse(text: &str) -> Result<StackSpec, SpecError> {
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

//! The one-line form of a stack: `LAYER[:SETTING,...] | LAYER...`, from the bottom up.
//!
//! A setting is `key=value`, or `key` alone for a switch; the first setting of `host` may be the
//! bare path, that of `union` the bare branches. A backslash takes the next character literally
//! (needed before `,`, `|`, `\` and for blanks at either end of a value), `\xHH` is a byte. Colons
//! and equals signs in values need no escape: the first colon ends the layer's name, the first
//! equals sign the key.

use super::{LayerSpec, SpecError, StackSpec};

/// A layer as written: its name and its settings, unescaped and trimmed.
#[derive(Default)]
struct Words {
    name: Vec<u8>,
    settings: Vec<Vec<u8>>,
}

/// Collects the bytes of one word and drops unescaped blanks at both ends.
#[derive(Default)]
struct Word {
    bytes: Vec<u8>,
    /// Length up to the last significant byte.
    kept: usize,
}

impl Word {
    fn plain(&mut self, byte: u8) {
        let blank = byte.is_ascii_whitespace();
        if blank && self.bytes.is_empty() {
            return;
        }
        self.bytes.push(byte);
        if !blank {
            self.kept = self.bytes.len();
        }
    }

    fn literal(&mut self, byte: u8) {
        self.bytes.push(byte);
        self.kept = self.bytes.len();
    }

    fn take(&mut self) -> Vec<u8> {
        self.bytes.truncate(self.kept);
        self.kept = 0;
        std::mem::take(&mut self.bytes)
    }
}

/// Splits the line into layers and settings.
fn split(text: &[u8]) -> Result<Vec<Words>, SpecError> {
    let (mut layers, mut layer, mut word, mut named) = (Vec::new(), Words::default(), Word::default(), false);
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => word.literal(escaped(&mut bytes)?),
            b':' if !named => {
                layer.name = word.take();
                named = true;
            }
            b',' if named => layer.settings.push(word.take()),
            b'|' => finish(&mut layers, &mut layer, &mut word, &mut named),
            _ => word.plain(byte),
        }
    }
    finish(&mut layers, &mut layer, &mut word, &mut named);
    Ok(layers)
}

fn finish(layers: &mut Vec<Words>, layer: &mut Words, word: &mut Word, named: &mut bool) {
    if *named {
        layer.settings.push(word.take());
    } else {
        layer.name = word.take();
    }
    *named = false;
    layers.push(std::mem::take(layer));
}

/// Decodes the character after a backslash.
fn escaped(bytes: &mut impl Iterator<Item = u8>) -> Result<u8, SpecError> {
    let bad =
        || SpecError("a backslash at the end escapes nothing; write \\\\ for a backslash, \\xHH for a byte".to_owned());
    let byte = bytes.next().ok_or_else(bad)?;
    if byte != b'x' {
        return Ok(byte);
    }
    let mut digit = || bytes.next().and_then(|digit| char::from(digit).to_digit(16));
    let (high, low) = (digit(), digit());
    match (high, low) {
        (Some(high), Some(low)) => u8::try_from(high * 16 + low).map_err(|_| bad()),
        _ => Err(SpecError("\\x needs two hexadecimal digits, as in \\xff".to_owned())),
    }
}

/// Parses a line.
pub(super) fn parse(text: &[u8]) -> Result<StackSpec, SpecError> {
    let layers = split(text)?;
    if let [only] = layers.as_slice()
        && only.name.is_empty()
        && only.settings.is_empty()
    {
        return Ok(StackSpec::default());
    }
    let layers =
        layers.into_iter().enumerate().map(|(place, words)| layer(place + 1, words)).collect::<Result<_, _>>()?;
    Ok(StackSpec { layers })
}

fn layer(place: usize, words: Words) -> Result<LayerSpec, SpecError> {
    let known = LayerSpec::NAMES.join(", ");
    if words.name.is_empty() {
        return Err(SpecError(format!("layer {place} has no name; write one of {known}")));
    }
    let named = std::str::from_utf8(&words.name).ok().and_then(LayerSpec::named);
    let Some(mut layer) = named else {
        return Err(SpecError(format!(
            "layer {place}: there is no layer \"{}\"; there are {known}",
            words.name.escape_ascii()
        )));
    };
    let name = layer.name();
    let within = |error: SpecError| SpecError(format!("layer {place} ({name}): {error}"));
    for (index, setting) in words.settings.iter().enumerate() {
        apply(&mut layer, index, setting).map_err(within)?;
    }
    Ok(layer)
}

fn apply(layer: &mut LayerSpec, index: usize, setting: &[u8]) -> Result<(), SpecError> {
    if index == 0 && matches!(layer, LayerSpec::Host(_)) && !setting.starts_with(b"source=") {
        return layer.set("source", Some(setting));
    }
    if index == 0 && matches!(layer, LayerSpec::Union(_)) && matches!(setting.first(), Some(b'/' | b'.' | b'{')) {
        return layer.set("branch", Some(setting));
    }
    if setting.is_empty() {
        return Err(SpecError("an empty setting; remove the stray comma or colon".to_owned()));
    }
    let (key, value) = match setting.iter().position(|&byte| byte == b'=') {
        Some(equals) => (setting.get(..equals).unwrap_or_default(), setting.get(equals + 1..)),
        None => (setting, None),
    };
    layer.set(&String::from_utf8_lossy(key), value)
}

/// Prints a line.
pub(super) fn print(stack: &StackSpec) -> String {
    let layers: Vec<String> = stack.layers.iter().map(print_layer).collect();
    layers.join(" | ")
}

fn print_layer(layer: &LayerSpec) -> String {
    let mut text = layer.name().to_owned();
    let host = matches!(layer, LayerSpec::Host(_));
    for (index, (key, value)) in layer.settings().into_iter().enumerate() {
        text.push(if index == 0 { ':' } else { ',' });
        if host && key == "source" && !value.starts_with(b"source=") {
            escape(&value, &mut text);
        } else {
            text.push_str(key);
            // Only a switch is printed without a value; any other empty value needs the equals
            // sign.
            if !value.is_empty() || !is_switch(layer, key) {
                text.push('=');
                escape(&value, &mut text);
            }
        }
    }
    text
}

/// Whether a key may stand alone.
fn is_switch(layer: &LayerSpec, key: &str) -> bool {
    LayerSpec::named(layer.name()).is_some_and(|mut probe| probe.set(key, None).is_ok())
}

/// Prints a value so that it is parsed back unchanged.
fn escape(value: &[u8], text: &mut String) {
    let last = value.len().saturating_sub(1);
    for chunk in value.utf8_chunks() {
        let start = chunk.valid().as_ptr() as usize - value.as_ptr() as usize;
        for (offset, character) in chunk.valid().char_indices() {
            let place = start + offset;
            let edge = place == 0 || place == last;
            match character {
                ',' | '|' | '\\' => text.extend(['\\', character]),
                ' ' if edge => text.push_str("\\ "),
                _ if character.is_ascii_control() => text.push_str(&format!("\\x{:02x}", u32::from(character))),
                _ => text.push(character),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
}

//! Description of a stack, for `status` and `--explain`.

/// One layer and what lies below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The layer's name, as written in a stack (`host`, `remap`).
    pub layer: String,
    /// Its settings in the order of the documentation: key and value as a user would write them.
    pub settings: Vec<(String, String)>,
    /// The layers below.
    pub below: Vec<Description>,
}

impl Description {
    /// A layer without settings and with nothing below.
    pub fn new(layer: &str) -> Description {
        Description { layer: layer.to_owned(), settings: Vec::new(), below: Vec::new() }
    }

    /// Adds a setting.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<String>) -> Description {
        self.settings.push((key.to_owned(), value.into()));
        self
    }

    /// Adds a layer below.
    #[must_use]
    pub fn over(mut self, below: Description) -> Description {
        self.below.push(below);
        self
    }
}

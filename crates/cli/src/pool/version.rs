//! The version in the form of `zfs` and `zpool`.

/// Returns the version in the form of `zfs` and `zpool`: one line for the commands and one for the
/// kernel module, both of which are this program. The first number is the version of OpenZFS whose
/// letters, tables and JSON are implemented, since programs choose by it how to call us.
pub fn zfs_version() -> [String; 2] {
    ["zfs", "zfs-kmod"].map(|part| format!("{part}-2.3.0-nacre{}", env!("CARGO_PKG_VERSION")))
}

/// Returns the output of `version`, of `program` as it was called by `command`.
pub fn version(program: &str, command: &str, json: bool) -> String {
    let [userland, kernel] = zfs_version();
    if json {
        let head = serde_json::json!({ "command": format!("{program} version"), "vers_major": 0, "vers_minor": 1 });
        let both = serde_json::json!({ "userland": userland, "kernel": kernel });
        return serde_json::json!({ "output_version": head, "zfs_version": both }).to_string() + "\n";
    }
    if command.starts_with("nacre") {
        format!("nacre {}\n", env!("CARGO_PKG_VERSION"))
    } else {
        format!("{userland}\n{kernel}\n")
    }
}

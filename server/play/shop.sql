-- The shop of the playground; at its end, the user that Tidemark follows it with.
DROP DATABASE IF EXISTS shop;
CREATE DATABASE shop CHARACTER SET utf8mb4;
USE shop;
CREATE TABLE customers (id INT PRIMARY KEY, name VARCHAR(40) NOT NULL, city VARCHAR(40) NOT NULL);
CREATE TABLE products (
  id INT PRIMARY KEY, name VARCHAR(40) NOT NULL, price DECIMAL(10,2) NOT NULL, stock INT NOT NULL
);
CREATE TABLE orders (
  id BIGINT PRIMARY KEY AUTO_INCREMENT, customer_id INT NOT NULL, product_id INT NOT NULL, quantity INT NOT NULL,
  status VARCHAR(10) NOT NULL, ordered_at DATETIME(3) NOT NULL
);
INSERT INTO customers VALUES (1, 'Ada', 'London'), (2, 'Grace', 'New York'), (3, 'Edsger', 'Rotterdam'),
  (4, 'Barbara', 'Los Angeles'), (5, 'Leslie', 'New York'), (6, '金文', '上海');
INSERT INTO products VALUES (1, 'tea', 4.50, 1000000), (2, 'coffee', 7.25, 1000000), (3, 'chocolate', 2.80, 1000000),
  (4, 'teapot', 39.00, 1000000), (5, 'cup', 6.10, 1000000);

CREATE USER tidemark@'%' IDENTIFIED BY 'playground';
GRANT REPLICATION SLAVE, BINLOG MONITOR, SELECT ON *.* TO tidemark@'%';
GRANT CREATE, INSERT, UPDATE ON changefeed_dump.* TO tidemark@'%';
